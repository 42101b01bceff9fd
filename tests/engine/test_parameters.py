"""The parameters that a step updates, where they lie, and that all ranks begin with the same."""

from copy import deepcopy

import pytest
import torch
from engine_programs import bits, in_turns, make_step, mean_squared, table
from torch import nn
from worlds import close_mesh, cpu_only

from samestep.checkpoint.digest import state_digest
from samestep.engine.parameters import move_model, named_parameters
from samestep.errors import DeterminismError, UsageError
from samestep.run.run import Run


def refusal(make, world_size=1):
    """The one line with which a step is refused on every rank."""

    def program(communicator):
        with pytest.raises(UsageError) as caught:
            make(communicator)
        return str(caught.value)

    (text,) = set(in_turns(world_size, program))
    assert "\n" not in text
    return text


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


LINEAR = nn.Linear(5, 1)
LAZY = nn.Sequential(nn.Linear(5, 3), nn.LazyLinear(1))
SYNCHRONISED = nn.Sequential(nn.Linear(5, 8), nn.ModuleDict({"norm": nn.SyncBatchNorm(8)}))


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "said"),
    [
        (LAZY, None, {}, "parameter 1.weight has no shape yet; run the model once on a batch"),
        (LINEAR, sgd(nn.Linear(5, 1)), {}, "the optimizer holds 2 parameters, and 2 of them are not in the model"),
        (LINEAR, [sgd(LINEAR), sgd(nn.Linear(2, 2))], {}, "the optimizer holds 4 parameters, and 2 of them are not in"),
        (LINEAR, [], {}, "the optimizer holds 0 parameters"),
        (LINEAR, torch.optim.LBFGS(LINEAR.parameters()), {}, "LBFGS calls the loss several times a step"),
        (LINEAR, torch.optim.SparseAdam(LINEAR.parameters()), {}, "SparseAdam takes sparse gradients only"),
        (LINEAR, "sgd", {}, "got a str as optimizer"),
        (LINEAR, [1], {}, "got an int as optimizer"),
        (LINEAR, LINEAR.parameters(), {}, "got a generator as optimizer"),
        (SYNCHRONISED, None, {}, "module 1.norm is a SyncBatchNorm"),
        (nn.DataParallel(LINEAR), None, {}, "the model has a DataParallel; a step shares out its microbatches"),
        (nn.Sequential(LINEAR, nn.DataParallel(LINEAR)), None, {}, "the model has a DataParallel"),
        (LINEAR, sgd(LINEAR), {"late_check": True}, "late_check=True needs Adam or AdamW with fused=True, which skip"),
        (LINEAR, torch.optim.Adam(LINEAR.parameters()), {"late_check": True}, "late_check=True needs Adam or AdamW"),
        (LINEAR, torch.optim.RAdam(LINEAR.parameters()), {"late_check": True}, "late_check=True needs Adam or AdamW"),
    ],
)
def test_models_and_optimizers_that_cannot_be_are_refused_on_all_ranks(model, optimizer, options, said):
    for world_size in (1, 2):
        assert refusal(lambda c: make_step(c, model, optimizer=optimizer, **options), world_size).startswith(said)


def test_no_optimizer_is_refused():
    assert refusal(lambda c: Run(24, 4, communicator=c).train_step(LINEAR, None, mean_squared)).startswith(
        "got None as"
    )


def test_models_that_differ_between_ranks_are_refused_by_the_first_name():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        if communicator.rank == 1:
            model[1].running_mean[3] += 1
            model[2].weight.data[0, 0] += 1
        with pytest.raises(DeterminismError, match=r"2\.weight differs between the ranks at the start"):
            run.train_step(model, sgd(model), mean_squared)

    in_turns(3, program)


def test_models_of_different_make_are_refused():
    def program(communicator):
        with pytest.raises(DeterminismError, match="the ranks built different models"):
            make_step(communicator, nn.Sequential(*[nn.Linear(5, 5) for _ in range(1 + communicator.rank)]))

    in_turns(2, program)


def test_parameters_keep_the_models_order_each_once_whatever_the_optimizers_order():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    groups = [{"params": [model[1].bias], "lr": 0.1}, {"params": [model[0].weight, model[0].bias]}]
    assert list(named_parameters(model, [torch.optim.SGD(groups, lr=0.2)])) == ["0.weight", "0.bias", "1.bias"]


def test_parameters_that_no_optimizer_holds_are_left_alone():
    def program(communicator):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, weight_decay=0.1)
        mine = model[0].weight.grad = torch.ones_like(model[0].weight)
        before = model[0].weight.detach().clone()
        make_step(communicator, model, optimizer=optimizer)(table())
        assert torch.equal(model[0].weight.cpu(), before)
        assert model[0].weight.grad is mine
        assert bool((mine == 1).all())
        return bits(model, optimizer)

    assert len({*in_turns(1, program), *in_turns(3, program)}) == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_state_that_an_optimizer_has_made_before_the_step_moves_with_the_model(world_size, fused):
    def program(communicator):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=fused)
        make_step(communicator, model, optimizer=optimizer)(table())
        return {state["sum"].device for state in optimizer.state.values()} == {communicator.device}

    assert in_turns(world_size, program) == [True] * world_size


def test_stray_parameters_are_put_on_memory_borders_and_stay_the_same_parameters():
    model = nn.Sequential(nn.Linear(5, 8), nn.Conv2d(1, 2, 3))
    stray = torch.zeros(41)[1:].view(8, 5).normal_()
    assert stray.data_ptr() % 64
    model[0].weight.data = stray
    model[1].to(memory_format=torch.channels_last)
    parameter, strides = model[0].weight, model[1].weight.stride()
    value = stray.clone()
    move_model(model, torch.device("cpu"))
    assert model[0].weight is parameter
    assert torch.equal(parameter, value)
    assert parameter.data_ptr() % 64 == 0
    assert model[1].weight.stride() == strides


class Straying(nn.Module):
    """A buffer that is put somewhere between memory borders whenever it is moved."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 1)
        self.register_buffer("scale", torch.arange(3.0))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.scale = torch.cat([torch.zeros(1), self.scale])[1:]
        return self


def test_a_buffer_that_is_moved_to_the_device_is_put_on_a_memory_border_there():
    model = Straying()
    old, place = model.scale, model.scale.data_ptr()
    move_model(model, torch.device("cpu", 0))  # for torch this is another device than "cpu"
    assert model.scale is not old
    assert old.data_ptr() == place
    assert model.scale.data_ptr() % 64 == 0
    assert model.scale.tolist() == [0.0, 1.0, 2.0]


def test_parameters_that_are_views_of_one_memory_stay_so():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    flat = torch.randn(18)
    model[0].weight.data, model[1].weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
    move_model(model, torch.device("cpu"))
    flat.zero_()
    assert not model[0].weight.any()
    assert not model[1].weight.any()


class Wrapper(torch.Tensor):
    """A tensor around another one, whose operations must not be called."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    __torch_dispatch__ = None


def without_memory(kept):
    """A tensor of eight numbers whose storage has so many bytes left."""
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(kept)
    return tensor


KINDS = {
    "conjugated": (lambda: torch.randn(3, dtype=torch.complex64).conj(), ""),
    "negated": (lambda: torch.randn(3, dtype=torch.complex64).conj().imag, ""),
    "strided": (lambda: torch.randn(3, 5).t()[1:], ""),
    "expanded": (lambda: torch.ones(1).expand(3), ""),
    "empty": (lambda: torch.ones(0, 3), ""),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), ""),
    "subclass": (lambda: torch.ones(3).as_subclass(type("Named", (torch.Tensor,), {})), ""),
    "wrapper": (lambda: Wrapper(torch.ones(3)), "Wrapper"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    "quantized by channel": (
        lambda: torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "quantized",
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
    "sparse by row": (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "torch._mkldnn"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged), "torch.jagged"),
    "freed": (lambda: without_memory(0), "without memory"),
    "partly freed": (lambda: without_memory(16), "without memory"),
}


@cpu_only("kinds of tensors in host memory")
@pytest.mark.filterwarnings("ignore")  # of torch, about kinds that are prototypes
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_beside_the_weights_is_trained_with_or_named(kind):
    make, said = KINDS[kind]

    def program(communicator, place):
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        if place == "buffer":
            model.register_buffer("odd", make())
        else:
            model.odd = [make()] if place == "list" else make()
        step = make_step(communicator, model)
        for _ in range(3):
            step(table())
        return bits(step) if place == "buffer" else model.weight.tolist()

    for place in ("attribute", "list"):
        assert in_turns(2, program, place) == in_turns(1, program, place) * 2
    if not said:
        assert in_turns(2, program, "buffer") == in_turns(1, program, "buffer") * 2
    else:
        assert refusal(lambda c: program(c, "buffer"), 2).startswith(f"odd ({said}) has no bytes to compare")


class Normalised(nn.Linear):
    """Weights that normalise themselves through `.data`, in place or not."""

    rebind = False

    def forward(self, x):
        unit = nn.functional.normalize(self.weight.data)
        if self.rebind:
            self.weight.data = unit
        else:
            self.weight.data.copy_(unit)
        return super().forward(x)


class Rebound(Normalised):
    rebind = True


@pytest.mark.parametrize(
    ("make", "features"),
    [
        (lambda: [Normalised(5, 1)], table()[0]),
        (lambda: [Rebound(5, 1)], table()[0]),
        (lambda: [nn.Embedding(30, 4, max_norm=0.5), nn.Flatten(), nn.Linear(4, 1)], torch.arange(24).view(24, 1)),
    ],
    ids=["in place", "bound anew", "an embedding that renormalises its rows"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_that_writes_to_a_parameter_behind_torchs_back_is_refused_by_name(make, features, world_size):
    with pytest.raises(DeterminismError, match=r"0\.weight was written to while a microbatch ran"):
        in_turns(world_size, lambda c: make_step(c, nn.Sequential(*make()))((features, torch.zeros(len(features), 1))))


def train_changed(change, strategy="replicate"):
    """Trains two steps before and two after a change to the model; whether its parameters were trained after it."""

    def program(communicator):
        model = nn.Sequential(nn.Linear(5, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
        optimizer = sgd(model)
        step = make_step(communicator, model, optimizer=optimizer, strategy=strategy)
        step(table())
        change(model, optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(table())
        return all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    return program


def put_another_parameter(model, optimizer):
    model[1][1].weight = nn.Parameter(torch.ones_like(model[1][1].weight))


def put_another_layer(model, optimizer):
    model[1] = nn.Linear(3, 1)


def put_other_weights(model, optimizer):
    model.load_state_dict({name: torch.ones(t.shape) for name, t in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("change", "name"),
    [(put_another_parameter, "1.1.weight"), (put_another_layer, "1.1.weight"), (put_other_weights, "0.weight")],
)
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "replicate"), (2, "zero1")])
def test_a_parameter_that_was_replaced_is_named(change, name, world_size, strategy):
    said = refusal(train_changed(change, strategy), world_size)
    assert said.startswith(f"parameter {name} was replaced in the model")


def give_another_parameter_to_both(model, optimizer):
    put_another_parameter(model, optimizer)
    optimizer.param_groups[0]["params"][2] = model[1][1].weight


def put_another_function(model, optimizer):
    model[1][0] = nn.Sigmoid()


def put_a_parameter_back(model, optimizer):
    own = model[1][1].weight
    put_another_parameter(model, optimizer)
    model[1][1].weight = own


@pytest.mark.parametrize("change", [give_another_parameter_to_both, put_another_function, put_a_parameter_back])
def test_other_changes_to_a_model_go_on(change):
    assert all(in_turns(2, train_changed(change)))


@pytest.mark.parametrize(
    ("options", "frozen", "said"),
    [
        ({"strategy": "zero1"}, lambda model: model[0], "with strategy='zero1' what is trained stays"),
        ({}, lambda model: model, "no parameter of the optimizer is trainable"),
    ],
)
def test_a_refused_freezing_that_is_undone_goes_on(options, frozen, said):
    def program(communicator):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        step = make_step(communicator, model, bucket_bytes=16, **options)
        step(table())
        frozen(model).requires_grad_(False)
        with pytest.raises(UsageError, match=said):
            step(table())
        frozen(model).requires_grad_(True)
        return step(table()).loss.hex()

    assert len({*in_turns(1, program), *in_turns(2, program)}) == 1


@pytest.fixture
def alone():
    """A run of this process, in which a model may be sharded over one rank."""
    yield Run(24, 4, num_threads=torch.get_num_threads())
    close_mesh()


@pytest.mark.parametrize(("first", "second"), [("replicate", "sharded"), ("sharded", "replicate")])
def test_one_run_deals_its_microbatches_in_one_way(alone, first, second):
    models = nn.Linear(5, 1), nn.Linear(5, 1)
    alone.train_step(models[0], sgd(models[0]), mean_squared, strategy=first)
    with pytest.raises(UsageError, match="strategy='sharded' holds for all"):
        alone.train_step(models[1], sgd(models[1]), mean_squared, strategy=second)


@pytest.mark.parametrize("strategy", ["replicate", "sharded"])
def test_a_call_of_train_step_that_was_refused_is_corrected(alone, strategy):
    model = nn.Linear(5, 1)
    optimizer = sgd(model)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter of the optimizer is trainable"):
        alone.train_step(model, optimizer, mean_squared, strategy=strategy)
    model.requires_grad_(True)
    with pytest.raises(UsageError, match="late_check=True needs Adam or AdamW"):
        alone.train_step(model, optimizer, mean_squared, strategy=strategy, late_check=True)
    assert alone.train_step(model, optimizer, mean_squared, strategy=strategy)(table()).loss > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_of_an_optimizer_keep_their_dtype_when_a_script_loads_its_state(dtype):
    def trained(num_steps, saved=()):
        def program(communicator):
            step, model, optimizer = made(communicator)
            parts = [model, optimizer, step]
            for part, state in zip(parts, saved, strict=False):
                part.load_state_dict(state)
            for _ in range(num_steps):
                step((x, y))
            return state_digest(model, optimizer), deepcopy([part.state_dict() for part in parts])

        (result,) = in_turns(1, program)
        return result

    def made(communicator):
        torch.manual_seed(0)
        model = nn.Linear(5, 1, dtype=dtype)
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
        run = Run(8, 4, communicator=communicator)
        return run.train_step(model, optimizer, lambda m, b: (m(b[0]) - b[1]).square().mean()), model, optimizer

    x, y = (torch.randn(8, n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (5, 1))
    whole, _ = trained(4)
    _, half = trained(2)
    assert trained(2, half)[0] == whole
    # By itself torch casts the product of NAdam's momenta.
    plain = torch.optim.NAdam(nn.Linear(5, 1, dtype=dtype).parameters(), lr=0.02)
    plain.load_state_dict(half[1])
    assert plain.state_dict()["state"][0]["mu_product"].dtype == dtype != half[1]["state"][0]["mu_product"].dtype
