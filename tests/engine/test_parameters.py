"""Which parameters a step updates, where they lie, and that all ranks begin with the same."""

import pytest
import torch
from engine_programs import bits, mean_squared, table
from torch import nn
from worlds import in_turns

from samestep.comm.mesh import close_mesh
from samestep.engine.parameters import named_parameters, settle_model
from samestep.errors import DeterminismError, UsageError
from samestep.train.run import Run


def make_step(communicator, model, optimizer, **options):
    return Run(24, 4, communicator=communicator).train_step(model, optimizer, mean_squared, **options)


def refusal(make, world_size=1):
    """The one line with which a step is refused on every rank."""

    def program(communicator):
        with pytest.raises(UsageError) as caught:
            make(communicator)
        return str(caught.value)

    (text,) = set(in_turns(world_size, program))
    assert "\n" not in text
    return text


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lazy_layer_is_named(world_size):
    def make(communicator):
        model = nn.Sequential(nn.Linear(5, 3), nn.LazyLinear(1))
        make_step(communicator, model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert refusal(make, world_size).startswith("parameter 1.weight has no shape yet; run the model once on a batch")


def test_an_optimizer_of_another_model_is_refused():
    def make(communicator):
        make_step(communicator, nn.Linear(5, 1), torch.optim.SGD(nn.Linear(5, 1).parameters(), lr=0.1))

    assert refusal(make, 2).startswith("the optimizer holds 2 parameters, 2 of which are not in the model")


def test_one_of_several_optimizers_of_another_model_is_refused():
    def make(communicator):
        model = nn.Linear(5, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, nn.Linear(2, 2))]
        make_step(communicator, model, optimizers)

    assert "4 parameters, 2 of which are not in the model" in refusal(make)


def test_lbfgs_is_refused():
    def make(communicator):
        model = nn.Linear(5, 1)
        make_step(communicator, model, torch.optim.LBFGS(model.parameters()))

    assert refusal(make).startswith("LBFGS calls the loss several times a step")


@pytest.mark.parametrize("optimizers", [[], ()])
def test_no_optimizer_at_all_is_refused(optimizers):
    assert "holds 0 parameters" in refusal(lambda c: make_step(c, nn.Linear(5, 1), optimizers))


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [(None, "None"), ("sgd", "a str"), ([1], "a int"), (nn.Linear(5, 1).parameters(), "a generator")],
)
def test_what_is_no_optimizer_is_refused(optimizer, got):
    assert refusal(lambda c: make_step(c, nn.Linear(5, 1), optimizer)).startswith(f"got {got} as optimizer")


def test_syncbatchnorm_is_refused_by_its_name():
    def make(communicator):
        model = nn.Sequential(nn.Linear(5, 8), nn.ModuleDict({"norm": nn.SyncBatchNorm(8)}))
        make_step(communicator, model, torch.optim.SGD(model.parameters(), lr=0.1))

    text = refusal(make, 2)
    assert text.startswith("module 1.norm is a SyncBatchNorm")
    assert "GroupNorm" in text


def test_models_that_differ_between_ranks_are_refused_by_the_first_name():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        if communicator.rank == 1:
            model[1].running_mean[3] += 1
            model[2].weight.data[0, 0] += 1
        with pytest.raises(DeterminismError, match=r"2\.weight differs between the ranks at the start"):
            run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)

    in_turns(3, program)


def test_models_of_different_make_are_refused():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(1 + communicator.rank)])
        with pytest.raises(DeterminismError, match="the ranks built different models"):
            run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)

    in_turns(2, program)


def test_parameters_keep_the_models_order_each_once_whatever_the_optimizers_order():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    groups = [{"params": [model[1].bias], "lr": 0.1}, {"params": [model[0].weight, model[0].bias]}]
    assert list(named_parameters(model, [torch.optim.SGD(groups, lr=0.2)])) == ["0.weight", "0.bias", "1.bias"]


def test_parameters_that_no_optimizer_holds_are_left_alone():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, weight_decay=0.1)
        mine = model[0].weight.grad = torch.ones_like(model[0].weight)
        before = model[0].weight.detach().clone()
        step = run.train_step(model, optimizer, mean_squared)
        step(table())
        assert torch.equal(model[0].weight, before)
        assert model[0].weight.grad is mine
        assert bool((mine == 1).all())
        return bits(model, optimizer)

    assert len({*in_turns(1, program), *in_turns(3, program)}) == 1


def test_stray_parameters_are_put_on_memory_borders_and_stay_the_same_parameters():
    model = nn.Sequential(nn.Linear(5, 8), nn.Conv2d(1, 2, 3))
    stray = torch.zeros(41)[1:].view(8, 5).normal_()
    assert stray.data_ptr() % 64
    model[0].weight.data = stray
    model[1].to(memory_format=torch.channels_last)
    parameter, strides = model[0].weight, model[1].weight.stride()
    value = stray.clone()
    settle_model(model, torch.device("cpu"))
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
    settle_model(model, torch.device("cpu", 0))  # for torch this is another device than "cpu"
    assert model.scale is not old
    assert old.data_ptr() == place
    assert model.scale.data_ptr() % 64 == 0
    assert model.scale.tolist() == [0.0, 1.0, 2.0]


def test_parameters_that_are_views_of_one_memory_stay_so():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    flat = torch.randn(18)
    model[0].weight.data, model[1].weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
    settle_model(model, torch.device("cpu"))
    flat.zero_()
    assert not model[0].weight.any()
    assert not model[1].weight.any()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RAdam])
def test_a_late_check_needs_an_optimizer_that_can_leave_an_update_out(optimizer):
    def make(communicator):
        model = nn.Linear(5, 1)
        make_step(communicator, model, optimizer(model.parameters()), late_check=True)

    assert refusal(make) == (
        "late_check=True needs Adam or AdamW with fused=True, which can skip an update on the device"
    )


def test_a_sparse_buffer_is_refused_by_name():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Linear(5, 1)
        model.register_buffer("adjacency", torch.eye(3).to_sparse())
        run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)

    with pytest.raises(UsageError, match="adjacency is sparse"):
        in_turns(1, program)


def test_a_forward_that_writes_to_a_parameter_is_refused_by_name():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Embedding(30, 4, max_norm=0.5), nn.Flatten(), nn.Linear(4, 1))
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)
        step((torch.arange(24).view(24, 1), torch.zeros(24, 1)))

    with pytest.raises(DeterminismError, match=r"0\.weight was written to while a microbatch ran"):
        in_turns(2, program)


def train_changed(change, strategy="replicate"):
    """Trains two steps before and two after a change to the model; whether its parameters were trained after it."""

    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = run.train_step(model, optimizer, mean_squared, shard_optimizer=strategy == "owned")
        loader = run.loader(table(48))
        for batch in loader:
            step(batch)
        change(model, optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for batch in loader:
            step(batch)
        return all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    return program


def put_another_parameter(model, optimizer):
    model[1][1].weight = nn.Parameter(torch.ones(1, 3))


def put_another_layer(model, optimizer):
    model[1] = nn.Linear(3, 1)


def put_other_weights(model, optimizer):
    model.load_state_dict({name: torch.ones(t.shape) for name, t in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("change", "name"),
    [(put_another_parameter, "1.1.weight"), (put_another_layer, "1.1.weight"), (put_other_weights, "0.weight")],
)
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "replicate"), (2, "replicate"), (2, "owned")])
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
@pytest.mark.parametrize("world_size", [1, 2])
def test_other_changes_to_a_model_go_on(change, world_size):
    assert all(in_turns(world_size, train_changed(change)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_with_a_shared_optimizer_what_is_trained_stays_and_a_change_that_is_undone_goes_on(world_size):
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = run.train_step(model, optimizer, mean_squared, shard_optimizer=True, bucket_bytes=16)
        step(table())
        model[0].weight.requires_grad_(False)
        with pytest.raises(UsageError, match="with shard_optimizer=True what is trained stays"):
            step(table())
        model[0].weight.requires_grad_(True)
        return step(table()).loss.hex()

    assert set(in_turns(world_size, program)) == set(in_turns(1, program))


@pytest.mark.parametrize("world_size", [1, 2])
def test_when_nothing_is_trained_any_more_it_is_said_and_undone_it_goes_on(world_size):
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared, bucket_bytes=16)
        step(table())
        model.requires_grad_(False)
        with pytest.raises(UsageError, match="no parameter of the optimizer is trainable"):
            step(table())
        model.requires_grad_(True)
        return step(table()).loss.hex()

    assert set(in_turns(world_size, program)) == set(in_turns(1, program))


@pytest.fixture
def alone():
    """A run of this process, in which a model may be spread over one rank."""
    yield Run(24, 4, num_threads=torch.get_num_threads())
    close_mesh()


@pytest.mark.parametrize(("first", "second"), [("replicate", "sharded"), ("sharded", "replicate")])
def test_one_run_deals_its_microbatches_in_one_way(alone, first, second):
    models = nn.Linear(5, 1), nn.Linear(5, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    alone.train_step(models[0], optimizers[0], mean_squared, strategy=first)
    with pytest.raises(UsageError, match="strategy='sharded' deals the microbatches to the ranks in turn, for all"):
        alone.train_step(models[1], optimizers[1], mean_squared, strategy=second)


@pytest.mark.parametrize("strategy", ["replicate", "sharded"])
def test_a_call_of_train_step_that_was_refused_is_corrected(alone, strategy):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter of the optimizer is trainable"):
        alone.train_step(model, optimizer, mean_squared, strategy=strategy)
    model.requires_grad_(True)
    with pytest.raises(UsageError, match="late_check=True needs Adam or AdamW"):
        alone.train_step(model, optimizer, mean_squared, strategy=strategy, late_check=True)
    assert alone.train_step(model, optimizer, mean_squared, strategy=strategy)(table()).loss > 0
