"""The verbs of hand-written data parallelism: the same bits on any number of processes."""

import math
from functools import partial
from itertools import chain

import numpy as np
import pytest
import simulated_programs
import torch
from torch import nn
from tutorial_programs import bits, data, error_of, loss_of, parameters, reduce_what_everyone_holds, sum_values, train

from samestep.errors import DataError, DeviceError, UsageError
from samestep.tutorial import allreduce, replicate_params, split_and_load

alone = partial(simulated_programs.alone, num_devices=1)
SIZES = [32, 32, 13, 32, 3]  # an odd batch, and one that leaves the fourth device without a sample
WORLDS = (1, 2, 4)


@pytest.mark.parametrize("together", [True, False])
def test_hand_written_sgd_ends_in_the_same_bits_on_every_number_of_processes(worlds, together):
    reference = worlds(1).run(train, 4, SIZES)[0]
    assert len(set(reference["losses"])) == len(SIZES)
    for world_size in WORLDS:
        results = worlds(world_size).run(train, 4, SIZES, together)
        assert all(result["losses"] == reference["losses"] for result in results)
        assert all(result["bits"] == reference["bits"] for result in results)
        by_step = zip(*(result["rows"] for result in results), strict=True)
        assert [[*chain(*rows)] for rows in by_step] == reference["rows"], "each microbatch is computed once"


def test_hand_written_sgd_is_that_of_a_plain_loop(worlds):
    result = worlds(2).run(train, 4, SIZES)[0]
    params = [p.requires_grad_() for p in parameters("cpu")]
    for batch, loss in zip(data(SIZES, "cpu"), result["losses"], strict=True):
        total = loss_of(params, batch)
        assert float.fromhex(loss) == pytest.approx(total.item(), rel=1e-5)  # up to 32 float32 terms, another order
        gradients = torch.autograd.grad(total, params)
        with torch.no_grad():
            for p, gradient in zip(params, gradients, strict=True):
                p -= 0.5 * gradient / len(batch["x"])


@pytest.mark.parametrize("breaker", ["left fold", "local mean"])
def test_twin_a_reduction_that_depends_on_the_processes_is_noticed(worlds, breaker):
    reference = worlds(1).run(train, 4, SIZES[:2])[0]["bits"]
    assert any(
        result["bits"] != reference for result in worlds(3, "gloo").run(train, 4, SIZES[:2], True, False, breaker)
    )


def test_processes_beyond_the_devices_hold_a_ghost_that_does_not_count(worlds):
    (reference,) = worlds(1).run(train, 2, SIZES)
    results = worlds(3).run(train, 2, SIZES)
    assert all(result["losses"] == reference["losses"] for result in results)
    assert all(result["bits"] == reference["bits"] for result in results)
    assert results[2]["rows"] == [[0]] * len(SIZES)
    assert [a + b for a, b in zip(results[0]["rows"], results[1]["rows"], strict=True)] == reference["rows"]


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (130, 70)), ("bfloat16", (7,)), ("complex64", (7,)), ("int64", ())]
)
def test_a_sum_is_that_of_the_tree(worlds, dtype, shape):
    for num_devices, world_size in ((5, 1), (5, 3), (2, 3)):
        for same in worlds(world_size).run(sum_values, num_devices, dtype, shape):
            assert same
            assert all(same)


def test_before_anything_is_divided_every_process_sums_the_whole_list(worlds):
    for world_size in (1, 3):
        assert worlds(world_size).run(reduce_what_everyone_holds) == [[[111.0, 111.0]] * 3] * world_size


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("parameters", "the ranks hold different parameters"),
        ("batches", "the ranks got different batches"),
        ("lengths", "rank 1: split_and_load: 4 devices, 8 samples"),
        ("tensors", "the ranks reduce different tensors"),
        ("undivided", "the ranks hold different tensors"),
    ],
)
def test_ranks_that_differ_are_told_so(worlds, case, said):
    for kind, message in worlds(2).run(error_of, case):
        assert kind == "DeterminismError"
        assert said in message


def test_a_verb_inside_a_wrapped_forward_is_refused(worlds):
    for kind, message in worlds(2).run(error_of, "chunk"):
        assert kind == "UsageError"
        assert "replicate_params was called inside a wrapped forward" in message


def test_replicas_are_leaves_in_memory_of_their_own_with_equal_bits():
    source = {"w": nn.Parameter(torch.tensor([math.nan, -0.0])), "more": [torch.ones(2, 3).T, torch.arange(3)]}
    replicas = replicate_params(source, 3, script=alone())
    assert len(replicas) == 3
    pointers = {t.data_ptr() for r in [source, *replicas] for t in (r["w"], *r["more"])}
    assert len(pointers) == 4 * 3
    for replica in replicas:
        assert replica["w"].is_leaf
        assert replica["w"].requires_grad
        assert replica["more"][0].requires_grad
        assert not replica["more"][1].requires_grad
        assert bits([replica["w"]]) == bits([source["w"]])
        assert replica["more"][0].stride() == source["more"][0].stride()


def test_parameters_may_come_from_a_module():
    model = nn.Linear(3, 2)
    for params in (model.parameters(), list(model.parameters()), nn.ParameterList(model.parameters())):
        ((weight, bias),) = replicate_params(params, 1, script=alone())
        assert torch.equal(weight, model.weight)
        assert torch.equal(bias, model.bias)


def test_the_script_is_told_on_which_device_each_copy_is():
    marks = []
    script = alone(num_devices=4, mark=lambda tensor, index: marks.append(index) or tensor)
    replicate_params([torch.ones(2)], [2, 0, "cpu"], script=script)
    assert marks == [2, 0, -1]
    marks.clear()
    split_and_load((torch.ones(6, 1), torch.ones(6)), 3, script=script)
    assert marks == [0, 0, 1, 1, 2, 2]


def test_the_number_of_microbatches_that_was_asked_for_overrides_the_number_of_devices():
    script = alone(num_microbatches=4)
    assert [len(part) for part in split_and_load(torch.ones(8, 1), ["cpu"] * 2, script=script)] == [2] * 4
    assert len(replicate_params([torch.ones(1)], 1, script=script)) == 4


@pytest.mark.parametrize(("length", "sizes"), [(10, [3, 3, 2, 2]), (2, [1, 1, 0, 0]), (8, [2, 2, 2, 2])])
def test_an_uneven_batch_is_split_only_where_that_is_asked_for(length, sizes):
    x = torch.arange(float(length)).view(-1, 1)
    parts = split_and_load(x, 4, even_split=False, script=alone())
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), x)
    if len(set(sizes)) > 1:
        with pytest.raises(UsageError, match=rf"got {length} samples for 4 devices.*even_split=False"):
            split_and_load(x, 4, script=alone())


def test_microbatches_are_copies_that_keep_the_nesting():
    batch = {"x": torch.ones(4, 3), "names": list("abcd"), "scale": torch.tensor(2.0)}
    first, second = split_and_load(batch, 2, script=alone())
    assert second["names"] == ["c", "d"]
    first["x"].zero_()
    first["scale"].zero_()
    assert batch["x"].sum() == 12
    assert second["scale"] == 2
    assert all(part["x"].data_ptr() % 64 == 0 for part in (first, second))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_an_accelerator_that_is_not_there_is_refused():
    with pytest.raises(DeviceError, match=r"asked for cuda:1, torch .* sees no accelerator"):
        replicate_params([torch.ones(1)], ["cuda:1"], script=alone())


def reduced(tensors):
    """Reduces over two devices."""
    script = alone()
    replicate_params([torch.ones(1)], 2, script=script)
    allreduce(tensors, script=script)


CALLS = {
    "params": lambda params: replicate_params(params, 2, script=alone()),
    "devices": lambda devices: replicate_params([torch.ones(1)], devices, script=alone()),
    "batch": lambda batch: split_and_load(batch, 2, script=alone()),
    "tensors": reduced,
}


@pytest.mark.parametrize(
    ("call", "argument", "error", "said"),
    [
        ("params", nn.Linear(3, 2), UsageError, r"got a Linear as params; needed: list\(model.parameters\(\)\)"),
        ("params", [], UsageError, "got a list as params; needed: a list of tensors"),
        ("params", [1.0], UsageError, "got a list as params; needed: a list of tensors"),
        ("params", [torch.ones(2)] * 2, UsageError, "holds one tensor twice"),
        ("devices", [], UsageError, "at least one device"),
        ("devices", 0, UsageError, "at least one device"),
        ("devices", "cuda:0", UsageError, "give a list of devices"),
        ("devices", True, UsageError, "give a list of devices"),
        ("devices", ["gpu0"], DeviceError, "got 'gpu0' among devices"),
        ("devices", [None], DeviceError, "got None among devices"),
        ("batch", np.ones((4, 2)), UsageError, "holds a NumPy array"),
        ("batch", torch.ones(4, 2, requires_grad=True), UsageError, "the batch requires gradients"),
        ("batch", (torch.ones(4), torch.ones(5)), DataError, "tensors of 4, 5 samples"),
        ("batch", torch.ones(0, 2), DataError, "holds no samples"),
        ("tensors", [torch.ones(1)], UsageError, "got 1 tensor .* over 2 logical devices on 1 rank; this rank holds 2"),
        ("tensors", [torch.ones(1)] * 3, UsageError, "got 3 tensors"),
        ("tensors", [torch.ones(1), None], UsageError, "tensor 0 of local device 1 is None"),
        ("tensors", [[torch.ones(1), None]] * 2, UsageError, "tensor 1 of local device 0 is None"),
        ("tensors", [torch.ones(1), 2.0], UsageError, "tensor 0 of local device 1 is float; allreduce sums dense"),
        ("tensors", [torch.ones(1), [torch.ones(1)] * 2], UsageError, "do not match"),
        ("tensors", [torch.ones(1), torch.ones(2)], UsageError, "do not match"),
        ("tensors", [torch.eye(2).to_sparse()] * 2, UsageError, "is torch.sparse_coo; allreduce sums dense tensors"),
        ("tensors", [[], []], UsageError, "an empty list"),
        ("tensors", [], UsageError, "an empty list"),
        ("tensors", torch.ones(2), UsageError, "as tensors of allreduce; needed: a list"),
    ],
)
def test_what_cannot_be_replicated_split_or_reduced_is_refused(call, argument, error, said):
    with pytest.raises(error, match=said):
        CALLS[call](argument)


def test_the_last_call_says_how_many_devices_there_are():
    script = alone()
    for num_devices in (1, 3, 2):
        replicate_params([torch.ones(1)], num_devices, script=script)
        values = [torch.ones(()) for _ in range(num_devices)]
        allreduce(values, script=script)
        assert [value.item() for value in values] == [num_devices] * num_devices


@pytest.mark.parametrize("draws", [True, False])
def test_random_numbers_drawn_for_a_microbatch_are_remarked_on(capsys, draws):
    script = alone()
    parts = split_and_load(torch.ones(4, 2), 2, script=script)
    if draws:
        parts = [nn.functional.dropout(part) for part in parts]
    for _ in range(2):
        allreduce([part.sum() for part in parts], script=script)
    said = capsys.readouterr().err
    assert said.count("random numbers were drawn between split_and_load and allreduce") == draws
