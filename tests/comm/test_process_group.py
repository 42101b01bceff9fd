"""The ordered process group: every collective to the bit, what trains on it, and ranks that go."""

import gc
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType

import group_programs
import group_training
import pytest
import torch
import torch.distributed as dist
from group_programs import CASES, FACTOR, definition, drawn, end_without_goodbye, in_group, same_fold
from worlds import DEVICE, PATIENCE_SECONDS, cpu_only, in_turns, processes

from samestep.comm.connecting import connect_process_group
from samestep.errors import DeterminismError
from samestep.logical import collectives, process_group, work_queue
from samestep.logical.collectives import Operation
from samestep.logical.process_group import DISPATCHES, OrderedProcessGroup

TRANSPORTS = ["shared", "gloo"]


@pytest.fixture
def ranks_of(worlds):
    """`ranks_of(n)`: n processes without a default process group, which NCCL's transport has."""
    return lambda world_size: worlds(world_size, "shared" if DEVICE == "cuda" else "auto")


def reduce_in_turns(communicator, name, dtype, numel):
    """All reductions of one operation, without processes: this rank's results, and what they must be."""
    rank, ranks, transport = communicator.rank, communicator.world_size, communicator.transport
    values = [drawn(other, numel, dtype) for other in range(ranks)]
    operation = Operation(name, FACTOR)
    whole = definition(values, name)  # on the host
    values = [value.to(communicator.device) for value in values]
    reduced, at_root = values[rank].clone(), values[rank].clone()
    collectives.all_reduce(transport, reduced, operation)
    collectives.reduce(transport, at_root, ranks - 1, operation)
    sizes = [numel // ranks] * (ranks - 1) + [numel - numel // ranks * (ranks - 1)]
    part = torch.empty(sizes[rank], dtype=dtype, device=communicator.device)
    collectives.reduce_scatter(transport, values[rank].clone(), sizes, part, operation)
    root = whole if rank == ranks - 1 else values[rank]
    return [(reduced, whole), (at_root, root), (part, whole.split(sizes)[rank])]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_every_reduction_of_every_dtype_is_the_fold_along_the_tree_on_host_and_device_alike(ranks):
    for name, dtype in CASES:
        for results in in_turns(ranks, reduce_in_turns, name, dtype, 177):
            assert all(same_fold(name, got, wanted) for got, wanted in results), (name, dtype)


@pytest.mark.parametrize("piece_bytes", [4096, 100_000])
def test_a_large_tensor_gives_the_same_bits_in_whatever_pieces_it_goes(piece_bytes, monkeypatch):
    monkeypatch.setattr(collectives, "PIECE_BYTES", piece_bytes)
    for name in ("SUM", "MAX"):
        for results in in_turns(3, reduce_in_turns, name, torch.float32, 70_001):
            assert all(same_fold(name, got, wanted) for got, wanted in results)


@pytest.mark.parametrize(("ranks", "transport"), [(4, "shared"), (2, "gloo")])
def test_reductions_through_torch_distributed_have_the_bits_of_the_definition(ranks_of, tmp_path, ranks, transport):
    found = ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.reductions, ([5, 200],), transport)
    assert found == [[]] * ranks


def test_the_callers_autocast_is_not_the_groups(ranks_of, tmp_path):
    args = group_programs.reductions, [5]
    assert ranks_of(2).run(in_group, tmp_path / "store", group_programs.under_autocast, args) == [[]] * 2


@pytest.mark.parametrize(("ranks", "transport", "numel"), [(3, "shared", 300_000), (2, "gloo", 5)])
def test_what_was_made_in_inference_mode_is_reduced_and_moved(ranks_of, tmp_path, ranks, transport, numel):
    found = ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.of_inference, (numel,), transport)
    assert found == [[]] * ranks


def test_twin_written_as_other_tensors_are_it_cannot_be(ranks_of, tmp_path):
    said, _ = ranks_of(2).run(in_group, tmp_path / "store", group_programs.of_inference_as_they_are, (5,))
    assert "Inplace update to inference tensor" in said


@pytest.mark.parametrize(("ranks", "transport"), [(3, "shared"), (2, "gloo")])
def test_collectives_that_move_values_move_every_dtype(ranks_of, tmp_path, ranks, transport):
    found = ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.movements, (33,), transport)
    assert found == [[]] * ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_operations_run_in_the_order_of_their_calls_and_futures_follow(ranks_of, tmp_path, ranks):
    assert ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.asynchronous, (60,)) == [True] * ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_callback_calls_operations_and_waits_for_them_in_the_same_order_on_every_rank(ranks_of, tmp_path, ranks):
    assert ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.nested, (25,)) == [True] * ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_functional_and_coalesced_forms_find_the_group_by_name(ranks_of, tmp_path, ranks):
    assert ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.functional_forms) == [[]] * ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_objects_barriers_and_sub_groups(ranks_of, tmp_path, transport):
    assert ranks_of(4).run(in_group, tmp_path / "store", group_programs.objects, (), transport) == [True] * 4


def test_groups_that_only_their_members_make_find_each_other(ranks_of, tmp_path):
    assert ranks_of(4).run(in_group, tmp_path / "store", group_programs.members_alone) == [[]] * 4


def test_sparse_gradients_are_summed(ranks_of, tmp_path):
    assert ranks_of(3).run(in_group, tmp_path / "store", group_programs.sparse) == [True] * 3


def test_ddp_ends_in_the_bits_of_the_tree_however_it_fills_its_buckets(ranks_of, tmp_path):
    by_default, by_hook = group_training.train_by_hand(4), group_training.train_by_hand(4, torch.div)
    for number, variant in enumerate(group_training.DDP_VARIANTS):
        wanted = by_hook if "hook" in variant else by_default
        found = ranks_of(4).run(in_group, tmp_path / str(number), group_training.train_ddp, (variant,))
        assert found == [wanted] * 4, variant


def test_sums_in_rank_order_end_in_other_bits(ranks_of, tmp_path):
    found = ranks_of(4).run(in_group, tmp_path / "store", group_training.train_in_rank_order)
    assert len({*found}) == 1
    assert found[0] != group_training.train_by_hand(4)


def test_ddp_accumulates_skips_unused_layers_compresses_and_joins(ranks_of, tmp_path):
    first, *others = ranks_of(3).run(in_group, tmp_path / "store", group_training.train_unevenly)
    assert others == [first] * 2


def test_a_call_that_makes_no_sense_is_refused_and_the_group_goes_on(ranks_of, tmp_path):
    for messages, after in ranks_of(2).run(in_group, tmp_path / "store", group_programs.refusals):
        assert after == 2
        assert "reduction BAND of torch.float32" in messages[0]
        assert "reduction AVG of torch.bool" in messages[1]
        assert "3 rows for 2 ranks" in messages[2]
        assert "all-gather got tensors of 1 in length; needed: 6" in messages[3]
        assert "reduction MAX of sparse tensors" in messages[4]
        assert all("invalid root rank: 7; needed: 0 to 1" in message for message in messages[5:9])
        assert "invalid rank: 2; needed: 0 to 1" in messages[9]
        assert all("whose elements share memory: strides (0,)" in message for message in messages[10:13])
        assert "torch.sparse_coo" in messages[13] or "SparseCPU" in messages[13]
        assert "quint8" in messages[14] or "QuantizedCPU" in messages[14]
        assert all("got 3 tensors; needed: 2, one a rank" in messages[index] for index in (15, 16, 18))
        assert all("got tensors of" in messages[index] for index in (17, 19))
        assert len(messages) == 23
        if not DISPATCHES:  # else torch says that it has no rule for such a tensor
            assert all("got a DTensor" in message and "to_local()" in message for message in messages[20:])


def test_a_barrier_of_no_time_and_a_wait_of_little_end_in_torch_s_kind_of_error(ranks_of, tmp_path):
    first, *others = ranks_of(3).run(in_group, tmp_path / "store", group_programs.late)
    assert others == [[], []]
    assert "in 0 ms" in first[0]
    assert "was not done within 0.2 s" in first[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_only_nccl_has_the_group_has_too(ranks_of, tmp_path, ranks):
    gathered = [[float(rank)] * (rank + 1) for rank in range(ranks)]
    for transport in TRANSPORTS:
        found = ranks_of(ranks).run(in_group, tmp_path / transport, group_programs.only_nccl, (), transport)
        assert found == [(gathered, [5.0, 7.0, 9.0])] * ranks


@cpu_only("tensors of CPUs")
@pytest.mark.parametrize("ranks", [1, 2])
def test_messages_of_every_form_arrive_and_a_profile_has_their_shapes(ranks_of, tmp_path, ranks):
    shapes = {"[[2, 3]]", "[[2, 3, 2]]"} if ranks > 1 else set()  # of complex numbers; within a rank without gloo
    found = ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.messages_of_every_form)
    assert found == [([], shapes)] * ranks


@cpu_only("tensors of CPUs")
@pytest.mark.parametrize("ranks", [1, 2])
def test_futures_and_works_hold_the_tensors_that_were_handed_over(ranks_of, tmp_path, ranks):
    assert ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.held_by_futures) == [[]] * ranks


@cpu_only("tensors of CPUs")
@pytest.mark.skipif(not DISPATCHES, reason="backends of Python pass torch's dispatcher from torch 2.14 on")
def test_collectives_pass_the_dispatcher_of_torch(ranks_of, tmp_path):
    found = ranks_of(2).run(in_group, tmp_path / "store", group_programs.seen_by_dispatch)
    assert found == [(True, True, [1.0, -1.0], [0.0, 1.0])] * 2


@cpu_only("tensors of CPUs")
def test_join_divides_by_the_ranks_that_are_left(ranks_of, tmp_path):
    found = ranks_of(3).run(in_group, tmp_path / "store", group_training.train_joined)
    assert found == [[6.0, 6.0], [4.0, 6.0], [2.0, 6.0]]


@cpu_only("gloo carries the bytes between GPUs")
@pytest.mark.parametrize(
    ("how", "ranks", "calls"),
    [
        ("lengths", 2, ["allreduce, [(3,)]", "allreduce, [(4,)]"]),
        ("metric", 2, ["allreduce in backward 1, [(1,)]", "allreduce, [(1,)]"]),
        ("order", 2, ["broadcast, [(1,)]", "allreduce, [(1,)]"]),
        ("alone", 3, ["broadcast in the forward of DistributedDataParallel, [(2,)]", "barrier, []", "barrier, []"]),
        ("two of three", 3, ["allreduce, [(3,)]", "allreduce, [(4,)]", "barrier, []"]),
    ],
)
def test_ranks_out_of_step_are_told_what_each_of_them_calls_and_the_group_stays_failed(
    ranks_of, tmp_path, how, ranks, calls
):
    results = ranks_of(ranks).run(in_group, tmp_path / "store", group_programs.disagree, (how,))
    (text,) = {errors[-1] for errors, _ in results}
    assert all(text in errors[0] and gradient < 1000 for errors, gradient in results)
    lines = text.splitlines()
    assert lines[0] == "the ranks are out of step:"
    for rank, (line, call) in enumerate(zip(lines[1:], calls, strict=False)):
        assert re.fullmatch(rf"  rank {rank}: {re.escape(call)}, at \S*group_programs\.py, line \d+", line), line
    assert lines[ranks + 1].startswith("They may have other batches, but must all call the same collectives in the")
    assert ("calls model.module(…)" in text) == (how == "alone")


@cpu_only("gloo carries the bytes between GPUs")
def test_twin_by_sizes_alone_a_metric_is_added_to_a_gradient(ranks_of, tmp_path):
    results = ranks_of(2).run(in_group, tmp_path / "store", group_programs.disagree, ("metric", True))
    assert results == [([], 1000.5), ([], 0.0)], "and nothing is said"


def kept_by_failed_groups():
    """What groups out of step keep alive, before and after they are destroyed, with the works that have failed."""
    store, limit = dist.HashStore(), timedelta(seconds=PATIENCE_SECONDS)

    def rank_main(rank):
        ends = connect_process_group(store, rank, (0, 1), limit)
        group = OrderedProcessGroup(*ends, SimpleNamespace(timeout=limit, group_id="of threads"), (0, 1))
        works = [group.allreduce([torch.ones(3 + rank)], dist.AllreduceOptions()) for _ in range(2)]
        for work in [*works, *works]:
            with pytest.raises(DeterminismError, match="out of step"):
                work.wait()
        kept = reached([group.backend, works])
        group.abort()
        works.append(group.allreduce([torch.ones(3)], dist.AllreduceOptions()))
        with pytest.raises(process_group.GroupError, match="destroyed"):
            works[-1].wait()
        return [*kept, *reached([group.backend, works])]

    with ThreadPoolExecutor(2) as pool:
        return [each for kept in pool.map(rank_main, range(2)) for each in kept]


def reached(root):
    """All objects to which an object leads, as Python's collector sees it, but for those of the whole process."""
    found, ahead = {}, [root]
    while ahead:
        each = ahead.pop()
        is_shared = isinstance(each, type | ModuleType) or (isinstance(each, dict) and "__builtins__" in each)
        if id(each) not in found and not is_shared:
            found[id(each)] = each
            ahead += gc.get_referents(each)
    return found.values()


def test_no_error_that_a_group_keeps_has_a_traceback():
    assert TracebackType not in map(type, kept_by_failed_groups()), "C++ has the group and its works too, for ever then"


def test_twin_errors_that_are_kept_as_they_are_have_one(monkeypatch):
    for module in process_group, work_queue:
        monkeypatch.setattr(module, "packed", lambda error: error)
        monkeypatch.setattr(module, "unpacked", lambda error: error)
    assert TracebackType in map(type, kept_by_failed_groups())


def out_of_step(group, rank, kept):
    works = [group.allreduce([torch.ones(3 + rank)], dist.AllreduceOptions()) for _ in range(2)]
    kept += [*works, *(work.get_future() for work in works), *(raised(work.wait) for work in works)]


def with_another_length_in_a_callback(group, rank, kept):
    work = group.allreduce([torch.ones(3)], dist.AllreduceOptions())
    after = work.get_future().then(lambda _: kept.append(group.allreduce([torch.ones(3 + rank)])))
    kept += [work, after, raised(work.wait), raised(after.wait)]


def alone(group, rank, kept):
    if rank == 0:
        works = [group.allreduce([torch.ones(3)], dist.AllreduceOptions()) for _ in range(2)]
        kept += [*works, *(work.get_future() for work in works)]


def interrupted(group, rank, kept):
    operation = SimpleNamespace(name="SUM", prepared=lambda ours: ours, fold=lambda *_: raising(KeyboardInterrupt))
    group.backend._operation = lambda *_: operation
    options = dist.AllreduceOptions()
    options.asyncOp = False
    kept.append(raised(lambda: group.allreduce([torch.ones(3)], options)))
    assert type(kept[-1]) is KeyboardInterrupt
    del group.backend._operation
    kept.append(raised(lambda: group.allreduce([torch.ones(3)], options)))
    assert "was interrupted by KeyboardInterrupt(): this rank is behind the others" in str(kept[-1])


def raising(kind):
    raise kind


def raised(action):
    """What an action raises, with its traceback."""
    try:
        return action()
    except BaseException as error:
        return error


def mapped():
    """The memory that groups have mapped, and their threads."""
    gc.collect()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:samestep" in line]
    return lines + [thread.name for thread in threading.enumerate() if thread.name == "samestep of threads"]


@pytest.mark.parametrize("program", [out_of_step, with_another_length_in_a_callback, alone, interrupted])
def test_a_destroyed_group_holds_nothing_while_it_is_kept_and_is_gone_when_it_is_not(program):
    store, limit, meet = dist.HashStore(), timedelta(seconds=PATIENCE_SECONDS), threading.Barrier(2)

    def rank_main(rank):
        ends = connect_process_group(store, rank, (0, 1), limit)
        group = OrderedProcessGroup(*ends, SimpleNamespace(timeout=limit, group_id="of threads"), (0, 1))
        kept = [group, group.backend]
        program(group, rank, kept)
        meet.wait(PATIENCE_SECONDS)
        group.abort()
        return kept

    before = mapped()
    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(rank_main, range(2)))
    assert mapped() == before
    references = [weakref.ref(each) for by_rank in kept for each in by_rank[:2]]
    del kept
    gc.collect()
    assert [reference() for reference in references] == [None] * 4, "C++ refers to it, which Python's collector misses"


def test_an_operation_that_was_interrupted_is_done_for_all_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(work_queue.WorkQueue, "_start", lambda _: None)  # who waits runs it
    work = work_queue.WorkQueue("").submit(lambda: raising(KeyboardInterrupt), [], [], is_async=True)
    future = work.get_future()
    assert [type(raised(work.wait)) for _ in range(2)] == [KeyboardInterrupt, dist.DistBackendError]
    assert "interrupted by KeyboardInterrupt()" in str(raised(future.wait))


def lone_group():
    """A group of one rank."""
    options = SimpleNamespace(timeout=timedelta(1), group_id="")
    return OrderedProcessGroup(process_group.LocalTransport(), None, dist.HashStore(), options, (0,))


def test_a_group_tells_how_many_operations_were_called():
    group = lone_group()
    for number in range(3):
        assert group._get_sequence_number_for_group() == number
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())


def test_an_error_that_nobody_foresaw_says_where_it_arose(monkeypatch):
    monkeypatch.setattr(collectives, "all_reduce", lambda *_: 1 // 0)
    group = lone_group()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as raised:
            group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        assert "1 // 0" in "".join(raised.value.__notes__)


def ranks_in(world_size, program, *arguments):
    """Ranks that are processes of their own, and their pipes."""
    return processes(program, {rank: (rank, world_size, *arguments) for rank in range(world_size)})


@pytest.mark.parametrize("how", ["die", "leave", "be late", "no message"])
def test_a_rank_that_does_not_come_is_named_and_nobody_hangs(tmp_path, how):
    seconds = 3
    with ranks_in(3, group_programs.be_left, str(tmp_path / "store"), how, seconds) as ranks:
        for process, pipe in (ranks[0], ranks[1]):
            assert pipe.poll(PATIENCE_SECONDS)
            errors, took = pipe.recv()
            assert errors
            for is_named, message, missing in errors:
                assert is_named
                assert missing == (2,), message
                assert "waits for rank 2" in message
            assert took < (seconds if how in ("die", "leave") else 10 * seconds)
            process.join(PATIENCE_SECONDS)
            assert process.exitcode == 0


@pytest.mark.parametrize("how", ["waits", "forgets", "under way"])
def test_a_program_that_does_not_destroy_its_group_ends_all_the_same(tmp_path, how):
    with ranks_in(2, end_without_goodbye, str(tmp_path / "store"), how) as ranks:
        for process, _ in ranks.values():
            process.join(PATIENCE_SECONDS)
            assert process.exitcode == 0


def test_a_rank_that_dies_in_training_is_named_by_the_backward_of_the_others(tmp_path):
    with ranks_in(3, group_training.die_in_training, str(tmp_path / "store")) as ranks:
        for process, pipe in (ranks[0], ranks[1]):
            assert pipe.poll(PATIENCE_SECONDS)
            assert "waits for rank 2" in pipe.recv()
            process.join(PATIENCE_SECONDS)
            assert process.exitcode == 0  # DistributedDataParallel reads the failed future in C++
