"""The memory of a step on GPUs beside parameters and optimizer state, in units G of one gradient."""

import json

import pytest
from gpus import needs_fake_gpus, places, run, run_processes

pytestmark = needs_fake_gpus

# Nothing waits for the device but this program, two steps behind. Parts of one device's size would need one message.
PROGRAM = """
    import json, os
    import torch
    from torch import nn
    import samestep
    from samestep.checkpoint.digest import state_digest

    LAYERS, WIDTH, AHEAD, STEPS = 16, 512, 2, 5
    run = samestep.Run(64, 8)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    gradient = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    at_update, events = [], []
    optimizer.register_step_pre_hook(lambda *_: at_update.append(torch.cuda.memory_allocated()))
    options = {"bucket_bytes": WIDTH * WIDTH * 4, **json.loads(os.environ["OPTIONS"])}
    step = run.train_step(model, optimizer, lambda model, x: model(x).square().mean(), **options)
    samples = torch.randn(64, WIDTH)

    def take(steps):
        for _ in range(steps):
            if len(events) == AHEAD:
                events.pop(0).synchronize()
            step(samples)
            events.append(torch.cuda.current_stream().record_event())
        torch.cuda.synchronize()

    take(4)  # the first steps watch whether a backward adds to a gradient again
    held = {id(t): t for t in [*model.parameters(), *optimizer.param_groups[0]["params"]]}.values()
    states = [t for state in optimizer.state.values() for t in state.values()]
    base = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*held, *states]}.values())
    at_update.clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    take(STEPS)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    in_gradients = [(peak - base) / gradient, (max(at_update) - base) / gradient]
    print(json.dumps([*in_gradients, reserved / peak, state_digest(step)]))
    run.close()
"""


def measure(devices, **options):
    """By rank, in G: at most, and at the update; the peak of reserved by that of allocated memory; the digest."""
    variables = {"OPTIONS": json.dumps(options), "OMP_NUM_THREADS": "1", "FAKE_CUDA_LATE_US": "10000000"}
    found = run_processes(PROGRAM, *places(devices), devices=devices, **variables)
    return [json.loads(output) for output, _ in found]


@pytest.fixture(scope="module")
def digest():
    """The digest of one device; what it needs is checked, too."""
    ((peak, at_update, reserved, digest),) = measure(1)
    # Three sums of the tree, and of the fourth microbatch's gradient one bucket, which is a sixteenth, and activations.
    assert peak < 3.3, peak
    assert at_update < 1.1, at_update
    assert reserved < 1.3, reserved
    return digest


@pytest.mark.parametrize(
    ("devices", "options", "peak", "at_update", "reserved"),
    [
        (2, {}, 2.4, 1.1, 1.3),  # two sums of the tree, then the sum and what is under way
        (8, {}, 1.3, 1.1, 1.3),  # the sum, of which buckets leave as soon as they are made
        (2, {"overlap": False}, 3.2, 1.1, 1.3),  # two sums of the tree, and all of `.grad`
        (4, {"strategy": "zero1"}, 1.6, 0.4, 1.3),  # the sum, then the gathered parameters and a quarter of the sum
    ],
    ids=str,
)
def test_a_step_holds_the_sums_of_the_tree_and_its_update_one_gradient(
    digest, devices, options, peak, at_update, reserved
):
    for rank, (found_peak, found_at_update, found_reserved, found) in enumerate(measure(devices, **options)):
        assert found_peak < peak, rank
        assert found_at_update < at_update, rank
        assert found_reserved < reserved, f"rank {rank}: memory waits for a device that is two steps behind"
        assert found == digest


ABANDONED = """
    import torch
    from torch import nn
    from samestep.comm.communicator import Communicator
    from samestep.comm.reduction import Reduction
    from samestep.comm.transport import Arrived, LocalTransport
    from samestep.core.tree import Block
    from samestep.engine.gradients import GradientSum

    class Mirror(LocalTransport):
        world_size = 2  # the other rank sends what this one sends

        def exchange(self, parts, sizes, receive_sizes):
            return Arrived(parts[: sizes[0]].repeat(2))

        def gather(self, part, sizes=(), into=None):
            return Arrived(part.repeat(2) if into is None else into.copy_(part.repeat(2)))

    transport, device = Mirror(), torch.device("cuda", 0)
    transport.stream, transport.latency_bytes = torch.cuda.Stream(), LATENCY
    if not RELEASES:
        Reduction.release = lambda self: None
    layers = [nn.Linear(64, 64, bias=False, device=device) for _ in range(2)]
    parameters = [layer.weight for layer in layers]
    communicator = Communicator(device, transport, transport)
    sums = GradientSum(parameters, ["0", "1"], communicator, 1, overlap=False)
    sums.begin([[Block(0, 1)], [Block(1, 1)]])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    sums.push(0, torch.zeros((), device=device))
    torch.cuda.synchronize()
    sizes = {flat.untyped_storage().nbytes() for each in sums._sums for flat in each.sums}
    sums.start()
    for reduction in sums._started:
        reduction.fold()
    sums.abandon()
    theirs = [torch.full((size // 4,), 5.0, device=device) for size in sizes for _ in range(4)]
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    print(all(bool((each == 5).all()) for each in theirs))
"""


@pytest.mark.parametrize("latency", [0, 1 << 30], ids=["two messages", "one message"])
def test_memory_of_an_abandoned_exchange_is_free_only_once_its_stream_has_left_it(latency):
    for releases in (True, False):  # the twin's exchange writes to memory that is another tensor's by then
        program = ABANDONED.replace("RELEASES", str(releases)).replace("LATENCY", str(latency))
        assert run(program, FAKE_CUDA_LATE_US="10000000").split() == [str(releases)]


SHORT = """
    import os
    from contextlib import nullcontext
    import fake_cuda
    import torch
    from torch import nn
    import samestep
    from samestep.engine import step as step_module
    from samestep.errors import DeterminismError

    if os.environ["LOOKS"] == "0":
        step_module.enough_memory = lambda *_: nullcontext()
    run = samestep.Run(16, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, optimizer, lambda model, x: model(x).square().mean())
    held = torch.empty(int(os.environ["HELD"]) << 20, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(99 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass  # of the script's own: no step has gone on
    generator = torch.Generator().manual_seed(1)
    try:
        for number in range(3):
            x = torch.randn(16, 3, 8, 8, generator=generator)
            with fake_cuda.host_waits() as waits:
                step(x)
        print(len(waits), model[0].weight.tolist())
    except DeterminismError as error:
        before = model[0].weight.clone()
        print(error)
    run.close()
"""


EVALUATED = """
    import os
    import torch
    from torch import nn
    import samestep
    from samestep.errors import DeterminismError

    run = samestep.Run(16, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1)).cuda()
    held = torch.empty(int(os.environ["HELD"]) << 20, dtype=torch.uint8, device="cuda")

    def slope(model, x):
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(model(x).sum(), model[0].weight)
        return gradient.abs().sum().expand(len(x))

    data = torch.randn(20, 3, 8, 8)
    calls = (
        lambda: run.predict(model, data, forward=slope),
        lambda: run.evaluate(model, data[:18], {"slope": lambda output, _: output}, forward=slope),
    )
    for call in calls:
        try:
            call()
            print("done")
        except DeterminismError as error:
            print(error)
    run.close()
"""


def test_an_evaluation_in_which_cudnn_got_no_workspace_is_an_error():
    size = {"FAKE_CUDA_MEMORY_MIB": "64", "FAKE_CUDA_WORKSPACE_MIB": "8", "OMP_NUM_THREADS": "1"}
    assert run(EVALUATED, devices=1, HELD="16", **size).split() == ["done", "done"]
    for line in run(EVALUATED, devices=1, HELD="60", **size).splitlines():
        assert "times in an evaluation or prediction on rank 0, which went on: cuDNN leaves out a kernel" in line
        assert "Let it need less: more microbatches (num_microbatches)" in line


def train_with(free, looks=True):
    """The weights, or the error, of a training with so many of 64 MiB free, of which cuDNN's best kernel needs 8."""
    size = {"FAKE_CUDA_MEMORY_MIB": "64", "FAKE_CUDA_WORKSPACE_MIB": "8", "OMP_NUM_THREADS": "1"}
    return run(SHORT, devices=1, HELD=str(64 - free), LOOKS=str(int(looks)), **size)


def test_a_step_in_which_cudnn_got_no_workspace_is_an_error_and_no_other_bits():
    good = train_with(free=48)
    assert good.startswith("1 [["), "one wait a step, as without the check"
    assert train_with(free=32) == good
    found = train_with(free=4)
    assert "the memory of cuda:0 was short 1 times in step 1 on rank 0, which went on: cuDNN leaves out" in found
    assert "Let it need less: more microbatches (num_microbatches)" in found
    assert train_with(free=4, looks=False) != good, "the twin goes on with the bits of another kernel"
