"""Ranks on GPUs: NCCL if each has one to itself, whatever number it has there, else host memory."""

import subprocess
import sys
import textwrap

import pytest
from gpus import environment, needs_fake_gpus, places, run, run_processes, run_ranks, told

pytestmark = needs_fake_gpus

CHOOSE = """
    from datetime import timedelta
    from samestep.comm.connecting import have_own_gpus
    from samestep.comm.environment import read_environment
    from samestep.comm.rendezvous import Rendezvous, rendezvous
    from samestep.engine.rank_device import own_device

    place, timeout = read_environment(), timedelta(seconds=100)
    device = own_device(None, place)
    store = rendezvous(place, timeout)
    met = Rendezvous(store, place, timeout)
    print(device, have_own_gpus(met.gather_words, place.rank, device, place.transport == "auto"))
    store.set(f"read by {place.rank}", "yes")
    store.wait([f"read by {rank}" for rank in range(place.world_size)], timeout)
"""


def choices(*visible, transport="auto"):
    """The devices that ranks of one host get and whether they use NCCL, and their notes; by the GPUs that each sees."""
    ranks = [{**place, "CUDA_VISIBLE_DEVICES": ids} for place, ids in zip(places(len(visible)), visible, strict=True)]
    outputs = run_processes(CHOOSE, *ranks, devices=4, SAMESTEP_TRANSPORT=transport)
    return [out.strip() for out, _ in outputs], [error for _, error in outputs]


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(("2,0", "2,0"), ("cuda:0", "cuda:1")), (("3", "1"), ("cuda:0", "cuda:0"))],
    ids=["all GPUs", "one GPU each, as srun --gpus-per-task=1 shows them"],
)
def test_ranks_with_a_gpu_each_use_nccl(visible, devices):
    assert choices(*visible) == ([f"{device} True" for device in devices], ["", ""])


def test_ranks_that_share_a_gpu_go_through_host_memory_and_rank_0_says_so():
    found, notes = choices("1", "0", "1")
    assert found == ["cuda:0 False"] * 3
    assert notes[0].count("samestep: ") == 1
    assert "ranks 0, 2 have no GPU to themselves" in notes[0]
    assert notes[1:] == ["", ""]


def test_ranks_that_are_told_to_share_a_gpu_hear_nothing_of_it():
    assert choices("1", "1", transport="gloo") == (["cuda:0 False"] * 2, ["", ""])


GROUPS = """
    import os
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from samestep.comm.group import subgroup

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=100)
    dist.init_process_group("gloo", device_id=torch.device("cuda", rank))
    store = dist.distributed_c10d._get_default_store()
    for groups in ([(0,), (1, 2)], [(0, 2), (1,)], [(0, 2), (1,)]):
        transport = subgroup(groups, rank, "gloo", store, timeout)
        print(transport.ranks, transport.gather(torch.tensor([rank])).wait().tolist())
    dist.barrier()
"""


def test_gloo_groups_of_some_ranks_need_nothing_of_the_others_where_the_default_group_is_of_a_gpu():
    """As under NCCL, whose communicators of some ranks are split off that of all."""
    outputs = run_processes(GROUPS, *places(3), devices=3)
    assert [out.splitlines() for out, _ in outputs] == [
        ["(0,) [0]", "(0, 2) [0, 2]", "(0, 2) [0, 2]"],
        ["(1, 2) [1, 2]", "(1,) [1]", "(1,) [1]"],
        ["(1, 2) [1, 2]", "(0, 2) [0, 2]", "(0, 2) [0, 2]"],
    ]


TRAIN = """
    import torch
    from torch import nn
    import samestep

    run = samestep.Run(16, 4, device="cuda")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = run.train_step(model, optimizer, lambda m, b: m(b[0]).square().mean())
    losses = [step(batch).loss.hex() for batch in run.loader((torch.randn(64, 4),))]
    print(type(run.communicator.transport).__name__, run.communicator.transport.stream is not None)
    print(*losses, samestep.state_digest(step))
"""


@pytest.mark.parametrize("visible", [("0,1", "0,1"), ("3", "1")], ids=["both GPUs", "one GPU each"])
def test_ranks_with_a_gpu_each_train_over_nccl_to_the_bits_of_one(visible):
    ranks = [{**place, "CUDA_VISIBLE_DEVICES": ids} for place, ids in zip(places(2), visible, strict=True)]
    (one, _), (other, _), (alone, _) = *run_processes(TRAIN, *ranks, devices=4), *run_processes(TRAIN, {}, devices=1)
    assert one == other
    assert one.splitlines()[0] == "GroupTransport True"
    assert one.splitlines()[1] == alone.splitlines()[1]


UNLIKE = """
    import samestep

    try:
        samestep.Run(16, 4, device="cuda")
        print("connected")
    except samestep.SamestepError as error:
        print(type(error).__name__, error)
"""
FACTS = {
    "multiprocessors by rank: 132, 66": ({"FAKE_CUDA_SMS": "132,66"}, {}),
    "NVIDIA_TF32_OVERRIDE by rank: None, 0": ({}, {"NVIDIA_TF32_OVERRIDE": "0"}),
    "CUBLASLT_WORKSPACE_SIZE by rank: 64, None": ({"CUBLASLT_WORKSPACE_SIZE": "64"}, {}),
    "": ({"CUBLASLT_LOG_LEVEL": "1"}, {"CUDA_LAUNCH_BLOCKING": "1"}),
}


@pytest.mark.parametrize("found", FACTS, ids=["a part of a GPU", "TF32", "cuBLAS", "nothing that rounds"])
def test_ranks_whose_gpus_or_variables_round_otherwise_are_named_when_they_connect(found):
    both, own = FACTS[found]
    more = [both, own] if "FAKE" not in str(both) else [both, both]
    ranks = [{**place, **variables} for place, variables in zip(places(2), more, strict=True)]
    for said, errors in run_processes(UNLIKE, *ranks, devices=2):
        assert said.startswith("DeviceError the ranks would not compute" if found else "connected"), said + errors
        assert found in said


LEAVE = """
    import time
    import torch
    import samestep

    run = samestep.Run(16, 4, device="cuda")
    if run.rank == 0:
        time.sleep(300)
    run.communicator.transport.gather(torch.ones(4, device=run.device))
    raise ValueError("the user's own")
"""


def test_a_rank_that_fails_while_others_owe_it_an_exchange_ends_at_once():
    """Destroying NCCL's communicator would wait for the exchange."""
    command = [sys.executable, "-c", textwrap.dedent(LEAVE)]
    other, failed = (
        subprocess.Popen(command, env=environment(2, **place), stderr=subprocess.PIPE, text=True) for place in places(2)
    )
    try:
        assert failed.communicate(timeout=120)[1].rstrip().endswith("ValueError: the user's own")
        assert failed.returncode == 1
    finally:
        for process in (other, failed):
            process.kill()
            process.communicate()


ORDERED = """
    import hashlib
    import samestep
    samestep.register_backend()
    connect()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    found = {}
    def filled(value):
        tensor = torch.zeros(300_000, device=device)
        for _ in range(3):
            tensor += value / 4  # kernels that have not run yet when the collective is called
        tensor += value / 4
        return tensor
    waited = filled(rank + 1.0)
    work = dist.all_reduce(waited, async_op=True)
    work.wait()
    found["waited"] = (waited * 2).mean().item()
    future = dist.all_reduce(filled(rank + 2.0), async_op=True).get_future()
    found["future"] = future.then(lambda done: done.value()[0] * 3).wait().mean().item()
    gathered = [torch.empty(4, device=device) for _ in range(size)]
    dist.all_gather(gathered, filled(float(rank))[:4])
    found["gathered"] = [tensor.mean().item() for tensor in gathered]
    received = torch.empty(4, device=device)
    works = [dist.isend(filled(rank * 1.0)[:4], (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    found["received"] = (received + 1).mean().item()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 2)).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        inputs = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
    data = b"".join(value.detach().cpu().numpy().tobytes() for value in model.module.parameters())
    found["model"] = hashlib.sha256(data).hexdigest()
    dist.destroy_process_group()
    tell(**found)
"""


def test_an_ordered_process_group_has_the_same_bits_on_one_gpu_and_on_three(tmp_path):
    by_devices = []
    for devices in (1, 3):
        folder = tmp_path / str(devices)
        folder.mkdir()
        variables = {"FAKE_CUDA_DEVICES": str(devices), "FAKE_CUDA_ORDER": "late"}
        by_devices.append(told(run_ranks(folder, ORDERED, 3, "samestep", **variables)))
    assert by_devices[0] == by_devices[1]
    assert len({found["model"] for found in by_devices[0]}) == 1
    for rank, found in enumerate(by_devices[0]):
        assert (found["waited"], found["future"]) == (12, 27)
        assert found["gathered"] == [0, 1, 2]
        assert found["received"] == (rank - 1) % 3 + 1


@pytest.mark.parametrize(("mib", "is_kept"), [(100, False), (1000, True)])
def test_a_rank_that_hands_its_gpu_over_frees_what_it_has_cached_unless_as_much_is_free(mib, is_kept):
    program = """
        import tempfile, torch
        from samestep.launcher.device_token import DeviceToken
        with tempfile.TemporaryFile() as file:
            token = DeviceToken(file.fileno(), 0, 0)
            torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
            with token.lent():
                print(torch.cuda.memory_reserved() > 0)
    """
    assert run(program, FAKE_CUDA_MEMORY_MIB=str(mib)) == f"{is_kept}\n"


@pytest.mark.parametrize(("size", "transport"), [(3, "auto"), (2, "shared")])
def test_an_ordered_process_group_gives_tensors_of_gpus_the_bits_of_the_host_s(tmp_path, size, transport):
    program = """
        import samestep
        samestep.register_backend()
        backend = "samestep"
        connect()
        op = dist.ReduceOp

        def collectives(device):
            torch.manual_seed(rank)
            drawn = lambda dtype, *shape: (3 * torch.randn(shape)).to(dtype).to(device)
            found = []
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.complex64):
                few = dtype == torch.complex64
                for each in (op.SUM, op.AVG, *(() if few else (op.PRODUCT, op.MIN, op.MAX))):
                    found.append(drawn(dtype, 1003))
                    dist.all_reduce(found[-1], each)
                found += [drawn(dtype, 40, 30).t(), drawn(dtype, 20), drawn(dtype, 7), drawn(dtype, 5)]
                works = [dist.all_reduce(found[-4], async_op=True), dist.broadcast(found[-3], size - 1, async_op=True)]
                found.append(drawn(dtype, 6 * size))
                dist.all_gather_into_tensor(found[-1], drawn(dtype, 6))
                [work.wait() for work in works]
                dist.reduce(found[-3], 0), dist.reduce_scatter_tensor(found[-2], drawn(dtype, 5 * size))
                parts = [drawn(dtype, rank + other + 1) for other in range(size)]
                found += [torch.empty_like(part) for part in parts]
                dist.all_to_all(found[-size:], parts)
                found += [drawn(dtype, 3) for _ in range(size + 1)]
                dist.gather(found[-size - 1], found[-size:] if rank == 0 else None)
                dist.scatter(found[-size - 1], found[-size:] if rank == 1 else None, src=1)
            found.append(drawn(torch.float32, 3_000_000))
            dist.all_reduce(found[-1])
            dist.barrier()
            return [tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in found]

        pairs = [*zip(collectives("cuda"), collectives("cpu"), strict=True)]
        differ = [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]
        tell(differ=differ, over_nccl=bool(dist.group.WORLD.backend._over_nccl))
        dist.destroy_process_group()
    """
    for found in told(run_ranks(tmp_path, program, size=size, SAMESTEP_TRANSPORT=transport)):
        assert found == {"differ": [], "over_nccl": transport == "auto"}


def test_ranks_of_a_script_s_process_group_must_have_equal_gpus(tmp_path):
    program = """
        import samestep
        samestep.register_backend()
        connect()
        try:
            dist.all_reduce(torch.ones(4, device=torch.device("cuda", rank)))
            tell(error="")
        except samestep.SamestepError as error:
            tell(error=str(error))
        os._exit(0)
    """
    for found in told(run_ranks(tmp_path, program, backend="samestep", FAKE_CUDA_SMS="132,66")):
        assert "multiprocessors by rank: 132, 66" in found["error"]


@pytest.mark.parametrize("fault", ["another call", "another size", "lost", "lost after the meeting"])
def test_ranks_at_odds_over_gpus_are_named_at_once(tmp_path, fault):
    program = f"""
        import samestep
        samestep.register_backend()
        backend = "samestep"
        connect(seconds=20)
        x = torch.ones(8, device=device)
        dist.all_reduce(x)
        if rank == 1 and {fault!r} == "lost":
            os._exit(0)
        if {fault!r} == "lost after the meeting":  # over NCCL rank 0 waits for it for ever
            if rank == 1:
                samestep.comm.group.GroupTransport.gather = lambda *_: os._exit(0)
            dist.all_reduce(x)
        try:
            if rank == 1 and {fault!r} == "another call":
                dist.broadcast(x, 0)
            else:
                dist.all_reduce(torch.ones(8 + rank * ({fault!r} == "another size"), device=device))
        except (samestep.SamestepError, RuntimeError) as error:
            dist.destroy_process_group()
            tell(error=type(error).__name__, text=str(error))
        os._exit(0)
    """
    results = run_ranks(tmp_path, program)
    assert results[0][1]["error"] == ("GroupError" if "lost" in fault else "DeterminismError"), results
    assert ("rank 1" in results[0][1]["text"]) or "lost" not in fault


def test_large_tensors_take_no_more_pinned_memory_than_there_is(tmp_path):
    program = """
        import samestep
        from samestep.checkpoint.async_save import to_host_copy
        samestep.register_backend()
        connect()
        device = torch.device("cuda:0")
        large = torch.arange(10_000_000, dtype=torch.int32, device=device).view(2500, 4000) + rank
        parts = [torch.empty_like(large) for _ in range(size)]
        dist.all_gather(parts, large)
        right = [bool((part == large - rank + other).all()) for other, part in enumerate(parts)]
        columns = large.t()
        (copies,) = to_host_copy({"a": {"rows": large, "columns": columns, "some": columns[::2]}}).values()
        right += [bool((copies[name] == tensor.cpu()).all()) for name, tensor in
                  (("rows", large), ("columns", columns), ("some", columns[::2]))]
        tell(right=right, strides=copies["columns"].stride())
        dist.destroy_process_group()
    """
    for mib in ("48", "0"):  # of 40 MB tensors each has memory of its own; where none can be pinned nothing fails
        (tmp_path / mib).mkdir()
        for found in told(run_ranks(tmp_path / mib, program, backend="samestep", FAKE_CUDA_PINNED_MIB=mib)):
            assert found == {"right": [True] * 5, "strides": [1, 4000]}


def test_an_allocator_that_counts_no_shortages_of_memory_is_refused():
    program = """
        import torch, samestep
        model = torch.nn.Linear(2, 1)
        run = samestep.Run(4, 2, device="cuda")
        try:
            run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean())
        except samestep.SamestepError as error:
            print(error)
    """
    said = run(program, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert "cuda.allocator is cudaMallocAsync where samestep.Run needs native" in said
    assert run(program, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") == ""


BEHIND = """
    import os, signal
    import torch
    import samestep
    from samestep.errors import PeerLostError

    def lost():
        raise PeerLostError("rank 1 has ended")

    signal.alarm(60)
    run = samestep.Run(16, 4, device="cuda")
    transport = run.communicator.transport
    if run.rank == 0:
        transport.check_lost = lost  # as in a run that heals
        sums = torch.zeros(64, device=run.device)
        try:
            with torch.cuda.stream(transport.stream):
                for _ in range(100):
                    sums += transport.exchange(torch.ones(64, device=run.device), [32, 32], [32, 32]).wait()
                    for _ in range(9):
                        sums.add_(1)
        except PeerLostError:
            print("noticed", flush=True)
    os._exit(0)
"""


def test_a_host_hears_of_a_lost_rank_before_launches_behind_its_transfers_fill_the_queue():
    (said, errors), _ = run_processes(BEHIND, *places(2), devices=2, FAKE_CUDA_QUEUE="500")
    assert said == "noticed\n", errors
