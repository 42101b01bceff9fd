"""Programs on the ordered process group, which every rank of a world runs, or processes that find each other."""

import contextlib
import os
import random
import signal
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import device_of

from samestep.logical import process_group
from samestep.logical.process_group import GroupError, register_backend

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
BITS = ("BAND", "BOR", "BXOR")
CASES = [
    *[(name, dtype) for dtype in FLOATS for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")],
    *[(name, dtype) for dtype in COMPLEX for name in ("SUM", "AVG", "PRODUCT")],
    *[(name, dtype) for dtype in INTEGERS for name in ("SUM", "PRODUCT", "MIN", "MAX", *BITS)],
    *[("AVG", dtype) for dtype in INTEGERS[:5]],
    *[(name, torch.bool) for name in ("SUM", "PRODUCT", "MIN", "MAX", *BITS)],
]
FACTOR = 0.3
SPECIAL = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 1.0, 0.0]


def drawn(rank, numel, dtype, seed=0):
    """A rank's values, of very different magnitudes: another order of additions gives other bits.

    After every tenth there is a zero, an infinity or a NaN, so that each meets each on other ranks.
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_complex:
        parts = [drawn(rank, numel, torch.float64, 2 * seed + part + 7) for part in (0, 1)]
        return torch.complex(*parts).to(dtype)
    if dtype.is_floating_point:
        exponents = torch.randint(-3, 4, (numel,), generator=generator)
        values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0**exponents
        for number, at in enumerate(range(0, numel, 10 if numel > 10 else 4)):
            values[at] = SPECIAL[(rank + number // (rank + 1)) % len(SPECIAL)]
        return values.to(dtype)
    width = torch.empty(0, dtype=dtype).element_size()
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * width,), generator=generator)
    return values.to(torch.uint8).view(dtype)


def plain_tree(values, combine):
    """The definition: n values are split at the largest power of two below n."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return combine(plain_tree(values[:half], combine), plain_tree(values[half:], combine))


def python_integers(values, name):
    """The fold of integers as Python calculates it, modulo their width."""
    bits = 8 * values[0].element_size()
    combine = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }[name]
    dtype = values[0].dtype
    low = 0 if not dtype.is_signed else -(1 << bits - 1)
    columns = zip(*[value.tolist() for value in values], strict=True)
    found = [(plain_tree(list(column), combine) - low) % (1 << bits) + low for column in columns]
    return torch.tensor(found, dtype=dtype)


def multiply(left, right):
    """The product; of complex numbers by parts, each operation rounded."""
    if not left.is_complex():
        return left * right
    real = left.real * right.real - left.imag * right.imag
    return torch.complex(real, left.real * right.imag + left.imag * right.real)


def extreme(left, right, name):
    """The larger or the smaller number in IEEE 754's total order, in which -0 is below 0; of NaN the leftmost."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    places = [value.view(width) for value in (left, right)]
    places = [place ^ (place >> 8 * left.element_size() - 1 & torch.iinfo(width).max) for place in places]
    picked = torch.where((places[0] < places[1]) == (name == "MAX"), right, left)
    return torch.where(left.isnan(), left, torch.where(right.isnan(), right, picked))


def definition(values, name):
    """What a reduction of the ranks' values must give, to the bit."""
    dtype = values[0].dtype
    if dtype in INTEGERS and name != "AVG":
        return python_integers(values, name)
    if name == "PREMUL_SUM":
        return definition([value * FACTOR for value in values], "SUM")
    if name == "AVG":
        total = definition(values, "SUM")
        if dtype in INTEGERS:
            return torch.div(total, len(values), rounding_mode="trunc")
        if dtype.is_complex:
            return torch.complex(total.real / len(values), total.imag / len(values))
        return total / len(values)
    if dtype.is_floating_point and name in ("MIN", "MAX"):
        return plain_tree(values, lambda left, right: extreme(left, right, name))
    combine = {
        "SUM": torch.add,
        "PRODUCT": multiply,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[name]
    return plain_tree(values, combine)


def same_bits(ours, other):
    """Whether two tensors are equal to the bit: NaN is itself, and 0 is not -0."""
    ours, other = (tensor.contiguous().cpu() for tensor in (ours, other))
    return ours.dtype == other.dtype and torch.equal(ours.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def same_fold(name, ours, other):
    """Whether two results of a reduction are equal to the bit; which NaN is calculated is the device's choice."""
    is_moved = name in ("MIN", "MAX") or not (ours.is_floating_point() or ours.is_complex())
    parts = [part if is_moved else _without_payload(part.cpu()) for part in (ours, other)]
    return same_bits(*parts)


def _without_payload(values):
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return torch.where(real.isnan(), torch.full((), float("nan"), dtype=real.dtype), real)


def torch_operation(name):
    """The operation as torch names it."""
    return dist._make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


@contextlib.contextmanager
def group_of(rank, world_size, path, seconds=120, backend="samestep", transport="auto"):
    """The default process group of these ranks, until the end."""
    register_backend()
    store = dist.FileStore(str(path), world_size)
    before = os.environ.get("SAMESTEP_TRANSPORT")
    os.environ["SAMESTEP_TRANSPORT"] = transport
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
        )
        yield
    finally:
        if before is None:
            del os.environ["SAMESTEP_TRANSPORT"]
        else:
            os.environ["SAMESTEP_TRANSPORT"] = before
        if dist.is_initialized():
            dist.destroy_process_group()


def in_group(communicator, path, program, args=(), transport="auto"):
    """Runs a program of ranks on every rank, in an ordered process group."""
    with group_of(communicator.rank, communicator.world_size, path, transport=transport):
        return program(communicator.rank, communicator.world_size, *args)


def under_autocast(rank, ranks, program, *args):
    """Runs a program as within a forward in 16 bits."""
    with torch.autocast(device_of(rank).type, torch.bfloat16):
        return program(rank, ranks, *args)


def of_inference(rank, ranks, numel):
    """Collectives on what was made in inference mode, within it and after; those that are wrong."""
    values = [drawn(other, numel, torch.float32) for other in range(ranks)]
    whole, device = definition(values, "SUM"), device_of(rank)
    with torch.inference_mode():
        totals = [values[rank].to(device, copy=True) for _ in range(3)]
        sent, ours, outputs = totals[0].clone(), totals[0].clone(), [torch.zeros_like(totals[0]) for _ in range(ranks)]
        dist.all_reduce(totals[0])
        work = dist.all_reduce(totals[1], async_op=True)
    work.wait()
    dist.all_reduce(totals[2])
    dist.broadcast(sent, ranks - 1)
    dist.all_gather(outputs, ours)
    after = values[rank].to(device, copy=True)  # by memory that the group may have kept
    dist.all_reduce(after)
    pairs = [*((total, whole) for total in (*totals, after)), (sent, values[-1]), *zip(outputs, values, strict=True)]
    return [index for index, (got, wanted) in enumerate(pairs) if not same_bits(got, wanted)]


def of_inference_as_they_are(rank, ranks, numel):
    """The error of a group that writes such tensors as any others."""
    with mock.patch.object(process_group, "_memory", lambda tensor: tensor.data):
        try:
            return of_inference(rank, ranks, numel)
        except RuntimeError as error:
            return str(error)


def reductions(rank, ranks, numels):
    """Every operation on every dtype, by each collective that reduces; those that are wrong."""
    wrong = []
    device = device_of(rank)
    for name, dtype in CASES:
        for numel in numels:
            values = [drawn(other, numel * ranks, dtype) for other in range(ranks)]
            ours = values[rank].to(device)
            operation = torch_operation(name)
            whole = definition(values, name)
            part = whole[rank * numel : (rank + 1) * numel]
            group = dist.group.WORLD
            options = dist.AllreduceOptions()
            options.reduceOp = operation
            found = {}
            reduced = ours.clone()
            group.allreduce([reduced], options).wait()  # not dist.all_reduce, which refuses some complex ones
            found["all_reduce"] = reduced, whole
            if not dtype.is_complex:
                root = (rank + 1) * 0 + ranks - 1
                reduced = ours.clone()
                dist.reduce(reduced, root, op=operation)
                found["reduce"] = reduced, whole if rank == root else values[rank]
                output = torch.empty(numel, dtype=dtype, device=device)
                dist.reduce_scatter_tensor(output, ours.clone(), op=operation)
                found["reduce_scatter_tensor"] = output, part
                output = torch.empty(numel, dtype=dtype, device=device)
                dist.reduce_scatter(output, list(ours.clone().chunk(ranks)), op=operation)
                found["reduce_scatter"] = output, part
            wrong += [
                (name, dtype, numel, kind) for kind, (got, wanted) in found.items() if not same_fold(name, got, wanted)
            ]
    return wrong


def movements(rank, ranks, numel):
    """What the simulator's calls lack, on every dtype: lists that all exchange, and messages; those that are wrong."""
    wrong, device = [], device_of(rank)

    def check(kind, got, wanted):
        if len(got) != len(wanted) or not all(same_bits(a, b) for a, b in zip(got, wanted, strict=True)):
            wrong.append((kind, dtype))

    for dtype in [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]:
        values = [drawn(other, numel, dtype) for other in range(ranks)]
        ours = values[rank].to(device)

        def empty(count=numel, dtype=dtype):
            return torch.zeros(count, dtype=dtype, device=device)

        sent, outputs = ours.clone(), [empty() for _ in range(ranks)]
        dist.broadcast(sent, ranks - 1)
        dist.all_gather(outputs, ours)
        check("broadcast and all_gather", [sent, *outputs], [values[-1], *values])
        sizes = [[(3 * a + 5 * b) % 7 for b in range(ranks)] for a in range(ranks)]  # some are 0
        blocks = [[drawn(10 * a + b, sizes[a][b], dtype, 3) for b in range(ranks)] for a in range(ranks)]
        outputs = [empty(sizes[a][rank]) for a in range(ranks)]
        dist.all_to_all(outputs, [block.to(device) for block in blocks[rank]])
        check("all_to_all", outputs, [blocks[a][rank] for a in range(ranks)])
        if ranks > 1:
            after, before = (rank + 1) % ranks, (rank - 1) % ranks
            into, other = empty(), empty()
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, ours, after), dist.P2POp(dist.irecv, into, before)])
            for work in works:
                work.wait()
            work = dist.isend(ours, after, tag=5)
            assert dist.recv(other, None if ranks == 2 else before, tag=5) == before  # of two ranks from any
            work.wait()
            check("batch_isend_irecv, send and recv", [into, other], [values[before]] * 2)
    return wrong


def asynchronous(rank, ranks, count):
    """Many operations under way, synchronous ones between them, futures with callbacks; the sums in order."""
    tensors = [torch.full((1 + 5000 * (number % 3),), float(number)) for number in range(count)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    first = works[0].get_future()
    chained = first.then(lambda future: future.value()[0] * 2)
    between = torch.ones(1)
    dist.all_reduce(between)
    assert all(work.is_completed() for work in works)  # those before a synchronous one are done
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    version = leaf._version
    dist.broadcast(leaf, 0)
    assert leaf._version == version, "autograd sees no change"
    futures = [work.get_future() for work in works]
    after = [work.wait() for work in reversed(works)]
    assert all(after)
    assert all(future.done() for future in futures)
    assert works[0].is_success()
    assert works[0].exception() is None
    assert works[1].result()[0] is tensors[1]
    # A callback may call operations, and wait for them: as comm hooks do.
    late = dist.all_reduce(torch.ones(2), async_op=True).get_future()

    def again(future):
        value = future.value()[0]
        dist.all_reduce(value)
        return value

    assert float(late.then(again).wait()[0]) == ranks * ranks
    assert float(between) == ranks
    assert float(chained.wait()[0]) == 0
    return [float(tensor[-1]) for tensor in tensors] == [float(number * ranks) for number in range(count)]


def nested(rank, ranks, count):
    """Operations whose callbacks call others and wait for them, as PowerSGD's hook does; the sums of all, in order."""
    sizes = random.Random(rank)  # of pauses: the ranks' callbacks run at different times
    found = []

    def called_by(number):
        def callback(future):
            time.sleep(sizes.random() / 500)
            inner = future.value()[0] * (number + 1)
            return dist.all_reduce(inner, async_op=True).get_future().wait()[0]

        return callback

    def chained_after(number):
        def callback(future):
            return dist.all_reduce(future.value() + number, async_op=True).get_future().wait()[0]

        return callback

    for number in range(count):
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(called_by(number))
        found.append(future.then(chained_after(number)))
        time.sleep(sizes.random() / 500)
    between = torch.ones(1)
    dist.all_reduce(between)
    wanted = [float((ranks * (number + 1) * ranks + number) * ranks) for number in range(count)]
    return float(between) == ranks and [float(future.wait()[0]) for future in found] == wanted


def functional_forms(rank, ranks):
    """Functional collectives by group name, coalesced forms, and gradients through collectives; those that fail."""
    world = dist.group.WORLD
    ours = torch.full((ranks * 2,), float(rank + 1))
    total = ranks * (ranks + 1) / 2
    found = {
        "all_reduce": functional.all_reduce(ours, "sum", world)[0] == total,
        "average": functional.all_reduce(ours, "avg", world)[0] == total / ranks,
        "reduce_scatter": functional.reduce_scatter_tensor(ours, "sum", 0, world).tolist() == [total] * 2,
        "all_gather": functional.all_gather_tensor(ours[:1], 0, world).tolist() == [1.0 + r for r in range(ranks)],
        "all_to_all": functional.all_to_all_single(ours, None, None, world)[-1] == ranks,
        "broadcast": functional.broadcast(ours, 0, world)[0] == 1,
    }
    summed = functional.all_reduce_coalesced([ours, ours * 2], "sum", world)
    found["all_reduce_coalesced"] = [float(each[0]) for each in summed] == [total, 2 * total]
    gathered = functional.all_gather_into_tensor_coalesced([ours[:1], ours[:2] * 2], world)
    found["all_gather_coalesced"] = [each.numel() for each in gathered] == [ranks, 2 * ranks]
    scattered = functional.reduce_scatter_tensor_coalesced([ours, ours * 2], "sum", [0, 0], world)
    found["reduce_scatter_coalesced"] = [float(each[0]) for each in scattered] == [total, 2 * total]
    with dist._coalescing_manager() as manager:
        several = [ours.clone(), (ours * 3).clone()]
        for each in several:
            dist.all_reduce(each)
    del manager
    found["coalescing manager"] = [float(each[0]) for each in several] == [total, 3 * total]
    leaf = torch.ones(2, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(leaf * (rank + 1), 0, world)
    (gathered * 1).sum().backward()  # torch 2.10 wants a contiguous gradient
    found["gradient"] = leaf.grad.tolist() == [float(ranks * (rank + 1))] * 2
    # What a functional collective returns is waited for by one that takes it, as is what it writes into.
    dist.all_reduce(chained := functional.all_reduce(ours, "sum", world))
    dist.all_gather(pieces := list(torch.zeros(ranks, ranks)), functional.all_gather_tensor(ours[:1], 0, world))
    sent = functional.all_reduce(ours * 2, "sum", world)
    if ranks > 1 and rank < 2:
        dist.send(sent, 1) if rank == 0 else dist.recv(sent, 0)
    found["chained"] = chained.tolist() == [ranks * total] * 2 * ranks and sent[0] == 2 * total
    found["chained"] &= [piece.tolist() for piece in pieces] == [[1.0 + r for r in range(ranks)]] * ranks
    return [name for name, right in found.items() if not right]


def objects(rank, ranks):
    """Object collectives, barriers and sub-groups; what this rank got."""
    gathered, scattered, sent = [None] * ranks, [None], [None if rank else {"from": 0}]
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank * 1000)})
    dist.broadcast_object_list(sent)
    dist.scatter_object_list(scattered, [f"for {other}" for other in range(ranks)] if rank == 0 else None)
    on_root = [None] * ranks if rank == ranks - 1 else None
    dist.gather_object(rank, on_root, ranks - 1)
    dist.barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    host = dist.new_group(backend="gloo")
    dist.monitored_barrier(host, timedelta(seconds=60))
    halves = [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    ours = next(number for number, half in enumerate(halves) if rank in half)
    groups = [dist.new_group(half) for half in halves]
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=groups[ours])
    assert dist.get_backend(groups[ours]) == "samestep"
    dist.destroy_process_group(groups[ours])
    assert [each["rank"] for each in gathered] == list(range(ranks))
    assert sent == [{"from": 0}]
    assert scattered == [f"for {rank}"]
    assert on_root == (list(range(ranks)) if rank == ranks - 1 else None)
    return float(value) == sum(halves[ours])


def members_alone(rank, ranks):
    """Groups that their members alone make, so that ranks have made different numbers of them; wrong sums."""
    wrong = []
    for members in ([0, 3], [1, 2], [0, 1], [1, 2], [2, 3], [0, 3]):
        if rank in members:
            value = torch.tensor([float(10**rank)])
            dist.all_reduce(value, group=dist.new_group(members))
            wrong += [members] if value.item() != sum(10**member for member in members) else []
    return wrong


def sparse(rank, ranks):
    """The sum of sparse tensors: whether it is the sum of dense ones."""
    index = torch.tensor([[rank, ranks, rank]])
    ours = torch.sparse_coo_tensor(index, torch.tensor([[1.0, 2.0], [0.1 * rank, 0.2], [3.0, 4.0]]), (ranks + 2, 2))
    values = [torch.zeros(ranks + 2, 2) for _ in range(ranks)]
    dist.all_gather(values, ours.to_dense())
    dist.all_reduce(ours)
    return torch.allclose(ours.to_dense(), sum(values))


def refusals(rank, ranks):
    """What is refused before anything is sent, by errors of torch's kind, after which the group still works."""
    messages, spread = [], distribute_tensor(torch.ones(4), init_device_mesh("cpu", (ranks,)), [Shard(0)])
    calls = [
        lambda: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.bool), op=dist.ReduceOp.AVG),
        lambda: dist.all_to_all_single(torch.ones(ranks + 1), torch.ones(ranks + 1)),
        lambda: dist.group.WORLD.all_gather_single_coalesced([torch.ones(1)], [torch.ones(3)]),
        lambda: dist.all_reduce(torch.ones(1, 1).to_sparse(), op=dist.ReduceOp.MAX),
        *(lambda call=call: call(torch.ones(2), 7) for call in (dist.broadcast, dist.reduce)),
        *(lambda call=call: call(torch.ones(2), None, 7) for call in (dist.gather, dist.scatter)),
        lambda: dist.isend(torch.ones(1), ranks),
        lambda: dist.all_reduce(torch.ones(1).expand(4)),
        lambda: dist.all_gather([torch.ones(1).expand(4) for _ in range(ranks)], torch.ones(4)),
        lambda: dist.irecv(torch.ones(1).expand(4), (rank + 1) % ranks),
        lambda: dist.broadcast(torch.ones(2).to_sparse(), 0),
        lambda: dist.all_reduce(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)),
        lambda: dist.all_gather([torch.ones(1)] * (ranks + 1), torch.ones(1)),
        lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * (ranks + 1)),
        lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(2)] * ranks),
        lambda: dist.all_to_all([torch.ones(1)] * (ranks + 1), [torch.ones(1)] * (ranks + 1)),
        lambda: dist.all_to_all([torch.ones(1)] * ranks, [torch.ones(2)] * ranks),
        lambda: dist.all_reduce(spread),
        lambda: dist.all_gather_into_tensor(torch.ones(4 * ranks), spread),
        lambda: dist.send(spread, (rank + 1) % ranks),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    one = torch.ones(1)
    dist.all_reduce(one)
    return messages, float(one)


def late(rank, ranks):
    """A barrier of no time, and a wait of little: the errors of rank 0, for which the others do not come."""
    group, messages, store = dist.group.WORLD, [], dist.distributed_c10d._get_default_store()
    if rank == 0:
        for call in (
            lambda: group.monitored_barrier(timedelta(0)),
            lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=0.2)),
        ):
            try:
                call()
            except RuntimeError as error:
                messages.append(str(error))
        store.set("late", "")
    store.wait(["late"])
    if rank:
        dist.all_reduce(torch.ones(1))
    return messages


def only_nccl(rank, ranks):
    """What NCCL has, and gloo has not: gathers of uneven tensors, messages to oneself; what this rank got."""
    device = device_of(rank)
    gathered = [torch.zeros(other + 1, device=device) for other in range(ranks)]
    dist.all_gather(gathered, torch.full((rank + 1,), float(rank), device=device))
    ours, other, last = (torch.zeros(2, device=device) for _ in range(3))
    operations = [
        dist.P2POp(dist.irecv, ours, rank),
        dist.P2POp(dist.isend, torch.full((2,), 5.0, device=device), rank),
        dist.P2POp(dist.isend, torch.full((2,), 7.0, device=device), rank),
        dist.P2POp(dist.irecv, other, rank),
        dist.P2POp(dist.isend, torch.full((2,), 9.0, device=device), rank, tag=1),
        dist.P2POp(dist.irecv, last, rank, tag=1),
    ]
    for work in reversed(dist.batch_isend_irecv(operations)):
        work.wait()
    return [[*each.tolist()] for each in gathered], [float(each[-1]) for each in (ours, other, last)]


def messages_of_every_form(rank, ranks):
    """What goes from a rank to the next; those that arrive with other values, and the shapes in a profile."""
    from torch.profiler import ProfilerActivity, profile

    wrong, before = [], (rank - 1) % ranks
    forms = [drawn(0, 6, dtype).view(2, 3) for dtype in FLOATS + COMPLEX + INTEGERS + [torch.bool]]
    forms += [torch._neg_view(drawn(0, 6, torch.float32).view(2, 3)), torch.ones(3, 2).mT]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for sent in forms:
            got = torch.empty_like(sent)
            work = dist.isend(sent, (rank + 1) % ranks)
            dist.recv(got, before)
            work.wait()
            if not same_bits(got, sent.resolve_neg()):
                wrong.append(str(sent.dtype))
    return wrong, {str(event.input_shapes) for event in profiled.events() if event.name in ("gloo:send", "gloo:recv")}


def held_by_futures(rank, ranks):
    """The tensors that the futures of collectives, and their works, hold, and those that were written; wrong ones."""
    ours, part, whole = torch.ones(2 * ranks), torch.zeros(2), torch.zeros(2 * ranks)
    several = [torch.zeros(2) for _ in range(ranks)]
    calls = {
        "all_reduce": ([ours], lambda: dist.all_reduce(ours, async_op=True)),
        "broadcast": ([ours], lambda: dist.broadcast(ours, 0, async_op=True)),
        "all_to_all_single": ([whole], lambda: dist.all_to_all_single(whole, ours, async_op=True)),
        "all_gather_into_tensor": ([whole], lambda: dist.all_gather_into_tensor(whole, part, async_op=True)),
        "reduce_scatter_tensor": ([part], lambda: dist.reduce_scatter_tensor(part, ours, async_op=True)),
        "all_gather": (several, lambda: dist.all_gather(several, part, async_op=True)),
        "all_to_all": (several, lambda: dist.all_to_all(several, list(ours.chunk(ranks)), async_op=True)),
    }
    wrong = []
    for name, (outputs, call) in calls.items():
        work = call()
        for found in (work.get_future().wait(), work.result()):
            same = len(found) == len(outputs) and all(a is b for a, b in zip(found, outputs, strict=False))
            wrong += [] if same and work.is_completed() else [name]
    return wrong


def seen_by_dispatch(rank, ranks):
    """What torch's dispatcher makes of collectives: counts, an event, a subclass's parts, a gather into a tensor."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import ProfilerActivity, profile
    from torch.testing._internal.two_tensor import TwoTensor

    pair, gathered = TwoTensor(torch.full((2,), float(rank)), torch.full((2,), -float(rank))), torch.empty(ranks)
    with CommDebugMode() as counted, profile(activities=[ProfilerActivity.CPU]) as profiled:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(pair, async_op=True).wait()
    if rank == 0:  # a rank that counts alone is not out of step
        counted.__enter__()
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        counted.__exit__(None, None, None)
    functional_ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    into = functional_ops.all_gather_into_tensor_out(torch.full((1,), float(rank)), ranks, name, out=gathered)
    functional_ops.wait_tensor(into)
    events = {event.key for event in profiled.key_averages()}
    return (
        counted.get_total_counts() > 0,
        "c10d::allreduce_" in events,
        [pair.a[0].item(), pair.b[0].item()],
        gathered.tolist(),
    )


def disagree(rank, ranks, how, twin=False):
    """Ranks whose calls differ; the first error, that of a later operation, and a gradient.

    The `twin` looks at sizes alone.
    """
    group, errors = dist.distributed_c10d._get_default_group(), []
    kind = type(group.backend._transport)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    normed = DistributedDataParallel(torch.nn.BatchNorm1d(1))
    calls = {
        "lengths": lambda: dist.all_reduce(torch.ones(3 + rank)),
        "metric": lambda: dist.all_reduce(torch.tensor([1000.0])) if rank else model(torch.ones(1, 1)).sum().backward(),
        "order": lambda: (rank or dist.broadcast(torch.ones(1), 0), dist.all_reduce(torch.ones(1))),
        "alone": lambda: dist.barrier() if rank else [normed(torch.ones(2, 1)), dist.barrier()],
        "two of three": lambda: dist.all_reduce(torch.ones(3 + rank)) if rank < 2 else dist.barrier(),
    }
    if twin:
        kind.call = property(lambda self: 0, lambda self, call: None)
    try:
        for call in (calls[how], dist.barrier):
            try:
                call()
            except Exception as error:
                errors.append(str(error))
    finally:
        if twin:
            del kind.call
    gradient = model.module.weight.grad
    return errors, 0.0 if gradient is None else gradient.item()


def be_left(rank, world_size, path, how, seconds, pipe):
    """A process whose last rank dies, sleeps or leaves instead of calling what the others call; their errors."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.alarm(100)
    with group_of(rank, world_size, path, seconds):
        dist.all_reduce(torch.ones(1))
        if rank == world_size - 1:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "leave":
                dist.destroy_process_group()
                pipe.send(None)
                return
            time.sleep(4 * seconds)
            pipe.send(None)
            return
        started, errors = time.monotonic(), []
        works = [
            lambda: dist.all_reduce(torch.ones(200_000), async_op=True),
            lambda: dist.broadcast(torch.ones(1), world_size - 1, async_op=True),
            lambda: dist.irecv(torch.ones(1), world_size - 1),
        ]
        for start in works[2:] if how == "no message" else works[:2]:
            try:
                start().wait()
            except (GroupError, RuntimeError) as error:
                errors.append((isinstance(error, GroupError), str(error), error.ranks))
        pipe.send((errors, time.monotonic() - started))


def end_without_goodbye(rank, world_size, path, how, pipe):
    """A process that ends with its group open; operations may be under way."""
    signal.alarm(100)
    pipe.send(os.getpid())
    register_backend()
    dist.init_process_group("samestep", store=dist.FileStore(str(path), world_size), rank=rank, world_size=world_size)
    work = dist.all_reduce(torch.ones(300_000), async_op=True)
    if how == "waits":
        work.wait()
    elif how == "under way" and rank == 0:
        dist.all_reduce(torch.ones(300_000), async_op=True)  # which the others never call
