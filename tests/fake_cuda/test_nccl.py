"""The fake NCCL: right code gets the numbers that gloo gives, and code that is wrong on NCCL is wrong on it."""

import pytest
from gpus import needs_fake_gpus, run_ranks, told

pytestmark = needs_fake_gpus

LATE = "30000000"  # µs: nothing runs that no host waits for, however long a busy machine takes

COLLECTIVES = """
    connect()
    found = {}
    def note(name, *tensors):
        found[name] = [tensor.float().cpu().tolist() for tensor in tensors]
    def values(count, dtype=torch.float32, of=rank):
        return (torch.arange(count) * 2 + of + 1).to(dtype).to(device)
    ops = dict(sum=dist.ReduceOp.SUM, max=dist.ReduceOp.MAX, min=dist.ReduceOp.MIN, product=dist.ReduceOp.PRODUCT)
    for name, op in ops.items():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8):
            dist.all_reduce(t := values(5, dtype), op)
            note(f"{name} {dtype}", t)
    dist.all_reduce(t := values(7), async_op=True).wait() if on_gpu else dist.all_reduce(t := values(7))
    note("asynchronous", t)
    dist.broadcast(t := values(3), 1)
    note("broadcast", t)
    dist.all_gather(into := [torch.empty(3, device=device) for _ in range(size)], values(3))
    note("all_gather", *into)
    dist.all_gather_into_tensor(t := torch.empty(3 * size, device=device), values(3))
    note("all_gather_into_tensor", t)
    dist.reduce_scatter_tensor(t := torch.empty(3, device=device), values(3 * size))
    note("reduce_scatter_tensor", t)
    dist.reduce(t := values(3), 1)
    note("reduce", *([t] if rank == 1 else []))
    into = [torch.empty(2, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(values(2), into, 0)
    note("gather", *(into or []))
    dist.scatter(t := torch.empty(2, device=device), [values(2, of=k) for k in range(size)] if rank == 0 else None, 0)
    note("scatter", t)
    rows = [[(a + b) % 3 for b in range(size)] for a in range(size)]  # uneven, and empty ones
    sent, received = rows[rank], [row[rank] for row in rows]
    t = torch.empty(sum(received), 2, device=device)
    dist.all_to_all_single(t, values(2 * sum(sent)).view(-1, 2), received, sent)
    note("all_to_all_single", t)
    t = torch.empty(4, device=device)
    dist.send(values(4), 1) if rank == 0 else dist.recv(t, 0) if rank == 1 else None
    note("recv", *([t] if rank == 1 else []))
    neighbours = [dist.P2POp(dist.isend, values(4), (rank + 1) % size), dist.P2POp(dist.irecv, t, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(neighbours):
        work.wait()
    note("batch", t)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(t := values(3), group=pair)
        note("subgroup", t)
    dist.all_gather_object(into := [None] * size, {"rank": rank})
    found["objects"] = into
    dist.barrier()
    tell(**found)
    dist.destroy_process_group()
"""


def test_collectives_give_what_gloo_gives(tmp_path):
    (tmp_path / "cpu").mkdir()
    expected = told(run_ranks(tmp_path / "cpu", COLLECTIVES, 3, "gloo"))
    assert told(run_ranks(tmp_path, COLLECTIVES, 3, FAKE_CUDA_ORDER="random")) == expected


def test_what_gloo_lacks_and_what_nccl_refuses(tmp_path):
    program = """
        connect(device_id=device)
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            dist.all_reduce(t := torch.full((4,), 1.0 + rank, device=device, dtype=dtype), dist.ReduceOp.AVG)
            found[f"avg {dtype}"] = t.tolist()
            dist.all_reduce(t := torch.ones(4, device=device, dtype=dtype), dist._make_nccl_premul_sum(0.5))
            found[f"premul {dtype}"] = t.tolist()
        refused = []
        for make in (lambda: torch.ones(2), lambda: torch.ones(2, device=device, dtype=torch.uint16),
                     lambda: torch.ones(2, device=f"cuda:{1 - rank}"), lambda: torch.ones(2, 2, device=device)[:, 0]):
            try:
                dist.all_reduce(make())
                refused.append("")
            except Exception as error:
                refused.append(f"{type(error).__name__}: {error}".splitlines()[0])
        mesh = dist.init_device_mesh("cuda", (2, 1))
        dist.all_reduce(t := torch.ones(2, device=device), group=mesh.get_group(0))
        a, b = torch.ones(2, device=device), torch.ones(3, device=device)
        with dist._coalescing_manager(device=device, async_ops=True) as together:
            dist.all_reduce(a)
            dist.all_reduce(b)
        together.wait()
        tell(**found, refused=refused, mesh=t.tolist(), coalesced=[*a.tolist(), *b.tolist()])
        dist.destroy_process_group()
    """
    for found in told(run_ranks(tmp_path, program)):
        assert found["avg torch.float32"] == found["avg torch.bfloat16"] == [1.5] * 4
        assert found["premul torch.float32"] == found["premul torch.bfloat16"] == [1.0] * 4
        assert found["mesh"] == [2.0] * 2
        assert found["coalesced"] == [2.0] * 5
        cpu, dtype, device, layout = found["refused"]
        assert cpu == "RuntimeError: No backend type associated with device type cpu"
        assert dtype.startswith("TypeError: Input tensor data type is not supported for NCCL process group")
        assert device.startswith("DistBackendError: Attempt to perform collective on tensor not on device passed")
        assert layout == "ValueError: Tensors must be contiguous"


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_is_there_only_after_a_wait(waits, tmp_path):
    program = f"""
        connect()
        dist.all_reduce(torch.ones(1, device=device))
        t = torch.full((1000,), rank + 1.0, device=device)
        torch.cuda.synchronize()
        work = dist.all_reduce(t, async_op=True)
        begun = work.is_completed()
        if {waits}:
            work.wait()
        tell(begun=begun, right=bool((t + 0 == 3).all()))
        dist.destroy_process_group()
    """
    assert told(run_ranks(tmp_path, program, FAKE_CUDA_LATE_US=LATE)) == [{"begun": False, "right": waits}] * 2


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_of_a_collective_is_kept_until_the_wait(keeps, tmp_path):
    program = f"""
        connect()
        dist.all_reduce(torch.ones(1, device=device))
        side = torch.cuda.Stream()
        source = torch.full((1000,), rank + 1.0, device=device)
        into = torch.empty(2000, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            work = dist.all_gather_into_tensor(into, source, async_op=True)
            if not {keeps}:
                work.wait()  # of the other stream alone: the tensor's own may write over it
        del source
        torch.zeros(1000, device=device).sum().item()
        work.wait()
        tell(right=into.view(2, -1).mean(1).tolist() == [1.0, 2.0])
        dist.destroy_process_group()
    """
    assert told(run_ranks(tmp_path, program, FAKE_CUDA_LATE_US=LATE)) == [{"right": keeps}] * 2


@pytest.mark.parametrize("shared", [True, False])
def test_two_ranks_on_one_gpu_are_refused(shared, tmp_path):
    program = f"""
        if {shared}:
            torch.cuda.set_device(device := torch.device("cuda:0"))
        connect()
        try:
            dist.all_reduce(torch.ones(1, device=device))
            tell(error="")
        except dist.DistBackendError as error:
            tell(error=str(error))
        os._exit(0)
    """
    for found in told(run_ranks(tmp_path, program)):
        assert ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device" in found["error"]) is shared
        assert ("ncclInvalidUsage" in found["error"]) is shared


@pytest.mark.parametrize("dies", [True, False])
def test_a_collective_without_its_peer_hangs_until_an_abort_that_leaves_half_of_it(dies, tmp_path):
    program = f"""
        connect()
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
        if {dies} and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        t = torch.full((1000,), rank + 1.0, device=device)
        work = dist.all_reduce(t, async_op=True)
        work.wait()
        weights = t * 2  # queued behind it
        time.sleep(3)
        hangs = not work.is_completed()
        if hangs:
            dist.distributed_c10d._get_default_group().abort()
        right = (weights == 6).tolist()
        error = ""
        try:
            dist.all_reduce(t)
        except dist.DistBackendError as caught:
            error = str(caught)
        tell(hangs=hangs, right=all(right), ran=bool((weights[500:] == 2).all()), error=error)
        os._exit(0)
    """
    status, found, output = run_ranks(tmp_path, program, FAKE_CUDA_LATE_US="100")[0]
    assert status == 0, output
    assert (found["hangs"], found["right"], found["ran"]) == (dies, not dies, dies)
    assert ("NCCL communicator was aborted on rank 0" in found["error"]) is dies


@pytest.mark.parametrize(("handling", "status"), [(None, -6), ("2", 0)])
def test_the_watchdog_ends_a_process_whose_collective_takes_too_long(handling, status, tmp_path):
    program = """
        connect(seconds=3)
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
        if rank == 1:
            os._exit(0)
        work = dist.all_reduce(torch.ones(4, device=device), async_op=True)
        time.sleep(6)
        error = ""
        try:
            dist.all_reduce(torch.ones(4, device=device), async_op=True)
        except dist.DistBackendError as caught:
            error = str(caught)
        tell(completed=work.is_completed(), successful=work.is_success(), aborted="was aborted" in error)
        os._exit(0)
    """
    (found_status, found, output), _ = run_ranks(tmp_path, program, TORCH_NCCL_ASYNC_ERROR_HANDLING=handling)
    assert found_status == status, output
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE" in output
    assert ("we are taking the entire process down" in output) is (handling is None)
    if handling is not None:
        assert found == {"completed": True, "successful": False, "aborted": True}


TRAINING = """
    kind = KIND
    connect()
    mesh = dist.init_device_mesh(device.type, (size,))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 8)]
    model = nn.Sequential(*layers).to(device)
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
    losses = []
    if kind == "pipeline":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        schedule = Schedule1F1B(PipelineStage(layers[rank], rank, size, device), 4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    else:
        from torch.distributed.fsdp import fully_shard
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh)
    if kind != "pipeline":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        if kind == "pipeline":
            found = []
            schedule.step(*([x] if rank == 0 else []), target=y if rank == size - 1 else None, losses=found)
        else:
            found = [nn.functional.mse_loss(model(x[mine]), y[mine])]
            found[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in found]
    tell(losses=losses)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["fsdp", "pipeline"])
def test_training_gives_the_losses_that_gloo_gives(kind, tmp_path):
    program = TRAINING.replace("KIND", repr(kind))
    (tmp_path / "cpu").mkdir()
    expected = told(run_ranks(tmp_path / "cpu", program, backend="gloo"))
    found = told(run_ranks(tmp_path, program, FAKE_CUDA_ORDER="random"))
    # two terms a sum and the same kernels: only the order of the terms may differ
    for one, other in zip(expected, found, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
