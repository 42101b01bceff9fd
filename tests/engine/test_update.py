"""The update by flat tensors: the optimizer's own bits, and its own `step` wherever somebody is interested in it."""

import copy
import functools
import warnings

import pytest
import torch
from engine_programs import bits, mean_squared, table
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from worlds import in_turns

from samestep.engine import update
from samestep.train.run import Run

ODD = [(5, 7), (7, 11), (11, 1)]  # sizes with ragged tails for every width of a vector
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.3, 0.6)),
}


def model_of(dtype=torch.float32):
    layers = [module for sizes in ODD for module in (nn.Linear(*sizes, dtype=dtype), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # steps are taken in this thread, too, whose number of threads must be the ranks'


class Training:
    """Some steps of a small model."""

    def __init__(self, communicator, name, dtype=torch.float32, num_microbatches=4, interested=False, model=None):
        run = Run(24, num_microbatches, communicator=communicator)
        self.model = model_of(dtype) if model is None else model()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        if interested:
            self.optimizer.register_step_post_hook(lambda *_: None)
        self.step = run.train_step(self.model, self.optimizer, mean_squared)
        self.batch = tuple(tensor.to(dtype) for tensor in table())

    def take(self, count):
        for _ in range(count):
            self.step(self.batch)
        return self

    @property
    def is_flat(self):
        return self.step._flat_update._flat is not None

    @property
    def bits(self):
        return bits(self.model, self.optimizer)


def train(communicator, name, **options):
    training = Training(communicator, name, **options).take(5)
    return training.bits, training.is_flat


def alone(program, *args, **options):
    return in_turns(1, lambda communicator: program(communicator, *args, **options))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_the_one_that_the_optimizers_own_step_gives(name, dtype):
    digest, is_flat = alone(train, name, dtype=dtype)
    assert is_flat
    assert alone(train, name, dtype=dtype, interested=True) == (digest, False)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_number_of_ranks_gives_the_same_bits(name, world_size):
    reference = alone(train, name)
    assert in_turns(world_size, train, name) == [reference] * world_size


def test_with_one_microbatch_the_bits_are_those_of_a_plain_loop():
    ours = alone(Training, "adamw", num_microbatches=1).take(5)
    torch.manual_seed(0)
    plain = model_of()
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        mean_squared(plain, table()).backward()
        optimizer.step()
    assert ours.is_flat
    assert ours.bits == bits(plain, optimizer)


def test_twin_arithmetic_that_rounds_otherwise_is_found_out_and_not_used(monkeypatch):
    reference = alone(train, "sgd", interested=True)[0]

    def otherwise(group, flat, gradient, state):
        flat.mul_(3).sub_(gradient, alpha=3 * group["lr"]).div_(3)

    monkeypatch.setitem(update.ARITHMETIC, torch.optim.SGD, otherwise)
    assert alone(train, "sgd") == (reference, False)


def test_twin_and_would_change_the_bits_if_it_were_used(monkeypatch):
    reference = alone(train, "sgd")[0]
    real = update.FlatUpdate._update

    def otherwise(self, flat, gradient, state):
        real(self, flat, gradient, state)
        if self._flat is not None:
            flat.mul_(3).div_(3)

    monkeypatch.setattr(update.FlatUpdate, "_update", otherwise)
    assert alone(train, "sgd")[0] != reference


def interested_by_hook(training, calls):
    training.optimizer.register_step_pre_hook(lambda *_: calls.append(1))


def interested_by_global_hook(training, calls):
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    training.handle = handle


def interested_by_replacing_step(training, calls):
    real = training.optimizer.step

    @functools.wraps(real)
    def step(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    training.optimizer.step = step


def interested_by_replacing_a_schedulers_step(training, calls):
    torch.optim.lr_scheduler.ConstantLR(training.optimizer, factor=1.0)
    interested_by_replacing_step(training, calls)


@pytest.mark.parametrize(
    "show_interest",
    [
        interested_by_hook,
        interested_by_global_hook,
        interested_by_replacing_step,
        interested_by_replacing_a_schedulers_step,
    ],
)
def test_who_is_interested_in_a_step_is_called_in_each_also_if_he_comes_late(show_interest):
    calls = []
    training = alone(Training, "momentum").take(3)
    assert training.is_flat
    show_interest(training, calls)
    try:
        training.take(2)
    finally:
        if hasattr(training, "handle"):
            training.handle.remove()
    assert len(calls) == 2
    assert training.bits == alone(train, "momentum")[0]


def test_a_replaced_step_of_the_class_is_called(monkeypatch):
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            Counting.calls += 1
            return super().step(closure)

    monkeypatch.setitem(OPTIMIZERS, "counting", lambda p: Counting(p, lr=0.1))
    assert alone(train, "counting")[1] is False
    assert Counting.calls == 5


def test_state_that_was_loaded_or_replaced_is_taken_up():
    reference = alone(Training, "adamw").take(6)
    training = alone(Training, "adamw").take(3)
    model, optimizer = copy.deepcopy(training.model.state_dict()), copy.deepcopy(training.optimizer.state_dict())
    training.take(2)
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    training.take(1)
    first = next(training.model.parameters())
    entry = training.optimizer.state[first]
    entry["exp_avg"] = entry["exp_avg"].clone()
    training.take(1)
    first.data = first.data.clone()
    training.take(1)
    assert training.is_flat
    assert training.bits == reference.bits


def test_a_parameter_without_gradient_is_left_out_and_comes_back():
    def program(communicator, interested):
        training = Training(communicator, "momentum", interested=interested).take(3)
        frozen = training.model[2].weight
        frozen.requires_grad_(False)
        training.take(2)
        frozen.requires_grad_(True)
        return training.take(2).bits

    assert alone(program, False) == alone(program, True)


class Skipping(nn.Module):
    """Leaves its second layer out when it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 1), nn.Linear(1, 1)
        self.skips = False

    def forward(self, x):
        return self.first(x) if self.skips else self.second(self.first(x))


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_a_parameter_that_a_step_does_not_use_counts_a_step_less(name):
    def program(communicator, interested):
        training = Training(communicator, name, interested=interested, model=Skipping)
        digests = []
        for number in range(7):
            training.model.skips = number == 3
            digests.append(training.take(1).bits)
        return digests

    assert alone(program, False) == alone(program, True)


def test_a_schedule_is_followed_and_nothing_is_said_about_its_order():
    def program(communicator, interested):
        training = Training(communicator, "sgd", interested=interested).take(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1, gamma=0.5)
            for _ in range(4):
                training.take(1)
                scheduler.step()
        return training.bits, training.is_flat

    digest, is_flat = alone(program, False)
    assert is_flat
    assert alone(program, True) == (digest, False)


def test_a_graph_that_was_kept_is_not_differentiated_with_the_weights_of_a_later_step():
    training = alone(Training, "sgd").take(3)
    loss = mean_squared(training.model, training.batch)
    training.take(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_that_somebody_else_holds_is_not_left_behind():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = model_of()
        held = model[0].weight.data
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)
        for _ in range(3):
            step(table())
        return torch.equal(held, model[0].weight), held.data_ptr() == model[0].weight.data_ptr()

    assert alone(program) == (True, True)


@pytest.mark.parametrize("share", ["a second tensor", "shared memory"])
def test_memory_that_is_shared_in_mid_run_is_not_left_behind_either(share):
    training = alone(Training, "momentum").take(3)
    assert training.is_flat
    first = next(training.model.parameters())
    if share == "shared memory":
        training.model.share_memory()
    held = first.data
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.take(2)
    assert held.data_ptr() == first.data_ptr()
    assert torch.equal(held, first)
    assert training.bits == alone(Training, "momentum").take(5).bits


def test_gradients_and_state_can_be_read_saved_and_loaded_as_ever(tmp_path):
    training = alone(Training, "adamw").take(4)
    plain = alone(Training, "adamw", interested=True).take(4)
    for ours, theirs in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        assert training.optimizer.state[ours].keys() == plain.optimizer.state[theirs].keys()
        for key, value in plain.optimizer.state[theirs].items():
            assert torch.equal(training.optimizer.state[ours][key], value)
    torch.save({"m": training.model.state_dict(), "o": training.optimizer.state_dict()}, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    again = alone(Training, "adamw")
    again.model.load_state_dict(loaded["m"])
    again.optimizer.load_state_dict(loaded["o"])
    again.step.num_steps = 4
    assert again.take(2).bits == training.take(2).bits == plain.take(2).bits


def test_a_model_is_saved_by_safetensors_and_a_tensor_with_nothing_but_itself(tmp_path):
    from safetensors.torch import load_file, save_file, save_model

    training = alone(Training, "adamw").take(3)
    assert training.is_flat
    save_model(training.model, str(tmp_path / "model.safetensors"))
    save_file(training.model.state_dict(), tmp_path / "state.safetensors")
    for name in ("model", "state"):
        loaded = load_file(tmp_path / f"{name}.safetensors")
        assert all(torch.equal(loaded[name], value) for name, value in training.model.state_dict().items())
    for parameter in training.model.parameters():
        for tensor in (parameter, *training.optimizer.state[parameter].values()):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("kind", ["two groups", "bfloat16", "fused", "large", "one parameter"])
def test_what_is_not_provided_for_is_left_to_the_optimizer(kind, monkeypatch):
    if kind == "large":
        monkeypatch.setattr(update, "FLAT_BYTES", 100)

    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        model = nn.Sequential(nn.Linear(5, 1, bias=False)) if kind == "one parameter" else model_of(dtype)
        groups = [{"params": [p]} for p in model.parameters()] if kind == "two groups" else model.parameters()
        optimizer = torch.optim.SGD(groups, lr=0.1, fused=True if kind == "fused" else None)
        step = run.train_step(model, optimizer, mean_squared)
        for _ in range(3):
            step(tuple(tensor.to(dtype) for tensor in table()))
        return step._flat_update._flat is None

    assert alone(program)
