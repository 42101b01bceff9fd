"""Models and options that cannot be sharded are refused by name with a cure; and the units that are gathered as one."""

from datetime import timedelta

import pytest
import torch
from sharded_programs import Chain, classify, frozen_later, refused, sentence, table
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from worlds import cpu_only, in_turns

import samestep
from samestep.comm.default_group import mesh_of_all
from samestep.engine.sharded_model import check_parameters, choose_modules
from samestep.engine.strategy_options import Sharded, as_strategy
from samestep.errors import UsageError


@pytest.mark.parametrize("optimizer", ["nadam", "adafactor"])
@pytest.mark.parametrize("strategy", ["sharded", "zero1"])
def test_optimizers_that_need_the_whole_of_a_parameter_are_refused_on_any_number_of_devices(
    worlds, strategy, optimizer
):
    name = {"nadam": "NAdam", "adafactor": "Adafactor"}[optimizer]
    for world_size in (1, 2):
        for said in worlds(world_size).run(refused, strategy, {"optimizer": optimizer}):
            assert said.startswith(f"UsageError: {name} may need the whole of a parameter")
            assert "AdamW" in said


@cpu_only("the kernels of GPUs round alike, wherever a part ends")
def test_fused_optimizers_on_a_cpu_are_refused_where_parts_end_anywhere(worlds):
    (said,) = worlds(1).run(refused, "sharded", {"optimizer": "fused"})
    assert "fused=True rounds on a CPU by the limits of a tensor" in said


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


class Scaled(nn.Linear):
    """Reads an attribute of its weight."""

    def forward(self, x):
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


def with_parameters(communicator, strategy, kind):
    """The digest of two steps of a model whose first weight is special, or the sentence with which it is refused."""
    run = samestep.Run(32, 8, communicator=communicator)
    model = nn.Sequential(Scaled(5, 8), nn.Linear(8, 2)).to(getattr(torch, kind, torch.float32))
    weight = model[0].weight
    weight.gain = 3.0

    def loss(given, batch):
        given_loss = classify(given, (batch[0].to(weight.dtype), batch[1]))
        return given_loss + weight.square().sum() if kind == "held" else given_loss

    def program():
        step = run.train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss, strategy=strategy)
        for _ in range(2):
            step(table(32))
        return samestep.state_digest(step)

    return sentence(program)


def test_attributes_of_parameters_are_those_of_what_stands_for_them(worlds):
    (reference,) = worlds(1).run(with_parameters, "replicate", "attribute")
    assert len(reference) == 64
    for world_size in (1, 2):
        assert worlds(world_size).run(with_parameters, "sharded", "attribute") == [reference] * world_size


@cpu_only("the kernels of GPUs round alike, wherever a part ends")
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_parameters_of_16_bits_are_refused_on_a_cpu(worlds, kind):
    for said in worlds(2).run(with_parameters, "sharded", kind):
        assert said.startswith("UsageError: SGD with 16-bit parameters rounds on a CPU by the limits of a tensor")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_has_kept_a_parameter_from_before_it_was_sharded_is_refused(worlds, world_size):
    for said in worlds(world_size).run(with_parameters, "sharded", "held"):
        assert said.startswith("LossError: the loss reads parameter 0.weight by itself")


def test_ranks_that_take_turns_cannot_form_a_process_group():
    assert "needs one process a rank" in in_turns(2, refused, "sharded", {})[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.register_parameter("scale", nn.Parameter(torch.tensor(1.0))), "scale has no dimension"),
        (lambda m: m.first.to(torch.float64), "of several types"),
        (lambda m: m.register_parameter("t", nn.Parameter(torch.ones(3, 4).t())), "t is not contiguous"),
        (lambda m: m.last.weight.register_hook(torch.zeros_like), "last.weight has hooks on its gradient"),
        (
            lambda m: m.last.weight.register_post_accumulate_grad_hook(lambda p: None),
            "last.weight has hooks on its gradient",
        ),
        (lambda m: m.register_parameter("own", Marked(torch.ones(3))), "own is of the class Marked"),
    ],
)
def test_parameters_that_cannot_be_sharded_are_named(change, words):
    model = Chain()
    change(model)
    with pytest.raises(UsageError, match=words):
        check_parameters(model)


def test_owned_parameters_that_are_not_contiguous_are_named():
    def program(communicator):
        run = samestep.Run(32, 8, communicator=communicator)
        model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        with pytest.raises(UsageError, match=r"0\.weight is not contiguous"):
            run.train_step(model, torch.optim.SGD(model.parameters()), classify, strategy="zero1")

    in_turns(2, program)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_sharded_step_trains_stays_as_it_was(worlds, world_size):
    for said in worlds(world_size).run(frozen_later, "sharded"):
        assert "UsageError: parameter last.weight was frozen after train_step" in said
    assert worlds(world_size).run(frozen_later, "replicate") == ["went on"] * world_size


def test_a_run_that_shards_its_state_has_no_spares_and_no_shares():
    def program(communicator, strategy, options):
        run = samestep.Run(32, 8, communicator=communicator, **options)
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(UsageError, match="leave spares out" if "spares" in options else "leave shares out"):
            run.train_step(model, optimizer, classify, strategy=strategy)

    in_turns(3, program, "zero1", {"spares": 1})
    in_turns(3, program, "sharded", {"spares": 1})
    in_turns(3, program, "sharded", {"shares": [1, 2, 1]})


@pytest.mark.parametrize(
    ("value", "words"),
    [("fsdp", "it is 'replicate', 'zero1', 'sharded', or one with options"), (3, r"samestep\.Sharded")],
)
def test_strategies_that_do_not_exist_are_refused(value, words):
    with pytest.raises(UsageError, match=words):
        as_strategy(value)


@pytest.mark.parametrize("options", [{"wrap": 0}, {"wrap": True}, {"wrap": "Linear"}, {"param_dtype": "fp8"}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Sharded(**options)


def test_a_strategy_with_options_is_taken_as_it_is():
    assert as_strategy(Sharded(wrap=5)) == Sharded(wrap=5)
    assert as_strategy("zero1").name == "zero1"


def named(model, wrap):
    """The names of the modules that come together as one."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in choose_modules(model, wrap)]


def test_by_size_the_largest_modules_below_it_come_together():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)), nn.Linear(8, 1))
    assert set(named(model, 144)) == {"0", "1", "2", "3", "4"}
    assert set(named(model, 80)) == {f"{block}.{layer}" for block in range(4) for layer in range(2)} | {"4"}


def test_modules_that_share_a_parameter_stay_together_and_opaque_ones_whole():
    model = Chain()
    assert not {"twice", "again"} & set(named(model, 300))
    attention = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32), nn.Linear(16, 16))
    assert "0.self_attn.out_proj" not in named(attention, 10)
    assert "0.self_attn" in named(attention, 10)


def test_a_function_that_names_nothing_or_a_container_is_refused():
    with pytest.raises(UsageError, match="wrap names no module"):
        choose_modules(Chain(), lambda module: False)
    with pytest.raises(UsageError, match="ModuleList, which is never called"):
        choose_modules(Chain(), lambda module: isinstance(module, nn.ModuleList))


def test_running_statistics_go_neither_with_recomputed_activations_nor_with_weights_of_16_bits(worlds):
    for said in worlds(2).run(recomputed_statistics):
        assert "keeps running statistics, which a second forward would count twice" in said
    (said,) = worlds(1).run(refused, "half", {})
    assert said.startswith("UsageError: norm keeps running statistics of 32 bits")


def penalized(communicator):
    """The sentence with which a penalty on parameters is refused."""
    run = samestep.Run(32, 8, communicator=communicator)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2))

    def loss(given, batch):
        penalty = sum(p.square().sum() for p in model.parameters())
        return classify(given, batch) + penalty.full_tensor()

    optimizer = torch.optim.SGD(model.parameters())
    return sentence(lambda: run.train_step(model, optimizer, loss, strategy="sharded")(table(32)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_reads_parameters_by_itself_is_refused(worlds, world_size):
    sentences = worlds(world_size).run(penalized)
    assert any(s.startswith("LossError: the loss reads parameter") and "weight_decay" in s for s in sentences)
    assert all(isinstance(said, str) for said in sentences)


def divided_before(communicator, strategy):
    """The sentence with which a model that PyTorch has divided is refused."""
    run = samestep.Run(32, 8, communicator=communicator)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2))
    parallelize_module(model, mesh_of_all(communicator, timedelta(seconds=60)), {"0": ColwiseParallel()})
    return sentence(lambda: run.train_step(model, torch.optim.SGD(model.parameters()), classify, strategy=strategy))


@pytest.mark.parametrize("strategy", ["replicate", "sharded"])
def test_a_model_that_pytorch_has_divided_is_refused(worlds, strategy):
    for said in worlds(2).run(divided_before, strategy):
        assert said.startswith("UsageError: parameter 0.weight is a DTensor (of parallelize_module, ")
        assert "--logical-devices" in said


def recomputed_statistics(communicator):
    """The sentence with which recomputing a BatchNorm is refused."""
    run = samestep.Run(32, 8, communicator=communicator)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), nn.Linear(8, 2))
    strategy = Sharded(activation_checkpointing=True, wrap=lambda module: isinstance(module, nn.Sequential))
    optimizer = torch.optim.SGD(model.parameters())
    return sentence(lambda: run.train_step(model, optimizer, classify, strategy=strategy)(table(32)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_inside_and_outside_of_reentrant_checkpointing_is_refused(worlds, world_size):
    for said in worlds(world_size).run(refused, "reused", {"model": "reentrant first"}):
        assert said.startswith("UsageError: module Gated is run in reentrant activation checkpointing")
