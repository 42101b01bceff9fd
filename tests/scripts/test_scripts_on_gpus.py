"""Unchanged scripts and examples on real devices instead of simulated ones: several GPUs give the bits of one."""

import json
import pickle
import re
import sys
from pathlib import Path
from textwrap import dedent

import gpus
import pytest
from test_patterns import PATTERNS, check_chunks, check_same, run_pattern

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from test_examples_on_devices import EXAMPLES

pytestmark = [gpus.needs_fake_gpus, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
SIZES = (1, 3)  # of three ranks one has two of the four chunks, and the others one each
SCRIPTS = [name for name in PATTERNS if name != "modules"]  # whose LSTM has a kernel that fake GPUs do not have
# Two kinds of devices; losses that are scaled; what the script sets around the forward.
KINDS = ("AMP", "mixed", "mixed, plain", "stream", "flags", "written")
SETTINGS = """
    import sys
    import torch
    from torch import nn

    kind = sys.argv[1]
    torch.manual_seed(0)

    class Mixed(nn.Module):
        # A weight, and a buffer that changes, in host memory; `own` is this process's device.
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.scale, self.own = nn.Parameter(torch.ones(8)), None
            self.register_buffer("count", torch.zeros(()))

        def _apply(self, function, recurse=True):
            self.first, self.last = self.first._apply(function), self.last._apply(function)
            self.own = self.first.weight.device
            return self

        def forward(self, x, factors):
            self.count += 1
            assert x.device == self.own == self.first.weight.device
            assert self.scale.device.type == self.count.device.type == "cpu"
            hidden = self.first(x) * (self.scale * self.count).to(self.own)
            return self.last(hidden) * factors.to(self.own)[:, None], factors * 2

    if kind in ("mixed", "mixed, plain"):
        model = Mixed().to("cuda:1")
    else:
        model = nn.Sequential(nn.Linear(8, 700), nn.Dropout(0.1), nn.Tanh(), nn.Linear(700, 400), nn.Linear(400, 4))
        model = model.cuda()
    is_plain = kind == "mixed, plain"
    where = {"device_ids": [1, 0, 3, 2], "output_device": 2} if kind == "mixed" else {}
    net = model if is_plain else nn.DataParallel(model, **where)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=kind == "AMP", init_scale=2.0**8)
    stream = torch.cuda.Stream() if kind == "stream" else torch.cuda.current_stream()
    if kind == "flags":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.cuda.set_device(2)
        torch.set_default_device("cuda")
    losses = []
    for step in range(5):
        x = torch.randn(10, 8, device="cuda")
        optimizer.zero_grad()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.autocast("cuda", enabled=kind == "AMP"):
            if isinstance(model, Mixed):
                out, factors = net(x, torch.rand(10, device="cpu"))
                assert factors.device.type == ("cpu" if is_plain else "cuda")
                loss = out.square().mean() + factors.sum().to(out.device)
            else:
                loss = net(x).float().square().mean()
        torch.cuda.current_stream().wait_stream(stream)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        if kind == "written":
            model[0].weight.data.mul_(0.5)
    RESULT = [losses, net.state_dict(), optimizer.state_dict(), scaler.get_scale()]
"""
RUN = """
    import pickle, sys
    from pathlib import Path

    target, tests = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path[:0] = [str(tests), str(tests / "scripts"), str(tests / "examples")]
    import test_examples_on_devices as examples
    import test_patterns as patterns
    from script_runs import run
    from worlds import World

    found = {}
    for n in map(int, sys.argv[3].split(",")):
        world = World(n)
        try:
            for name in sys.argv[4].split(","):
                found[name, n] = patterns.run_pattern(lambda n: world, n, name, target.parent / f"{name}-{n}")
            for name in examples.EXAMPLES if sys.argv[5] == "and examples" else ():
                (target.parent / name).mkdir(exist_ok=True)
                outcome = examples.run(lambda n: world, n, name, target.parent / name)
                saved = [(str(value.dtype), value.shape, value.cpu().tolist()) for value in outcome.saved]
                found[name, n] = outcome.lines, saved, outcome.chunks
            for kind in filter(None, sys.argv[6].split(";")):
                script = target.parent / "settings.py"
                found[kind, n] = run(lambda n: world, n, script, 4, [kind], cwd=target.parent / f"{kind}-{n}")
        finally:
            world.close()
    target.write_bytes(pickle.dumps(found))
"""


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    """The outcomes of all scripts and examples on one GPU and on several, by name and number."""
    target = tmp_path_factory.mktemp("on_gpus") / "outcomes"
    target.with_name("settings.py").write_text(dedent(SETTINGS))
    what = target, TESTS, ",".join(map(str, SIZES)), ",".join(SCRIPTS), "and examples", ";".join(KINDS)
    gpus.run(RUN, *what, devices=4, timeout=600, SAMESTEP_TEST_DEVICE="cuda", OMP_NUM_THREADS="1")
    return pickle.loads(target.read_bytes())


@pytest.mark.parametrize("name", [*SCRIPTS, *KINDS])
def test_a_script_has_the_same_bits_and_prints_on_every_number_of_gpus(on_gpus, name):
    alone = on_gpus[name, 1][0]
    assert alone.result, alone.message
    for n in SIZES[1:]:
        check_same(on_gpus[name, n], alone)
        if name in KINDS or PATTERNS[name].counted:
            check_chunks(on_gpus[name, n], alone)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_same_lines_and_bits_on_every_number_of_gpus(on_gpus, name):
    lines, saved, chunks = on_gpus[name, 1]
    assert lines
    assert saved
    for n in SIZES[1:]:
        assert on_gpus[name, n][:2] == (lines, saved)
        assert sorted(chunk for part in on_gpus[name, n][2] for chunk in part) == sorted(chunks[0])


DRAWING_NOTHING = ["by_hand", "errors", "visible_devices"]


@pytest.fixture(scope="module")
def on_rounding_alike(tmp_path_factory):
    """The outcomes of scripts that draw nothing, on one GPU that rounds as the host does."""
    target = tmp_path_factory.mktemp("on_gpus") / "outcomes"
    variables = {"SAMESTEP_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1", "FAKE_CUDA_ALIEN": "0"}
    gpus.run(RUN, target, TESTS, "1", ",".join(DRAWING_NOTHING), "alone", "", devices=4, timeout=600, **variables)
    return pickle.loads(target.read_bytes())


@pytest.mark.parametrize("name", DRAWING_NOTHING)
def test_a_script_that_draws_nothing_on_its_devices_has_the_bits_of_simulated_ones(
    worlds, on_rounding_alike, tmp_path, name
):
    expected = run_pattern(worlds, 1, name, tmp_path)[0]
    found = on_rounding_alike[name, 1][0]
    assert {path for path, value in expected.result.items() if found.result.get(path) != value} == set()
    assert re.sub(r"cuda:\d", "cuda:0", expected.stdout) == found.stdout, "a rank has one GPU"


# Of the gradients of a model of sixteen buckets; beside them there are next to no activations.
MEMORY = """
    import fake_cuda
    import torch
    from torch import nn
    from samestep.checkpoint.digest import state_digest

    LAYERS, WIDTH, STEPS = 16, 512, 6
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    forward = nn.DataParallel(model) if kind == "DataParallel" else model
    gradient = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, WIDTH, device="cuda")
    for step in range(STEPS):
        if step == STEPS // 2:  # the first forwards are checked at length
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        with fake_cuda.host_waits() as waits:
            for part in x.split(32) if kind == "accumulation" else [x]:
                loss = forward(part).square().sum().mul(1e3)
                if kind == "second derivatives":
                    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
                    loss = loss + sum(one.square().sum() for one in first)
                    del first
                loss.backward()
                del loss
        optimizer.step()
    beside = torch.cuda.max_memory_allocated() - gradient - x.nbytes
    torch.found = [beside / gradient, waits, state_digest(model, optimizer)]
"""
AS_RANK = """
    import json, os
    import torch
    from samestep.scripts.single_process import run_single_process
    from samestep.scripts.split_forward import calls, pieces
    from samestep.scripts.workers.link import Link

    pieces.BUCKET_BYTES = calls.BUCKET_BYTES = 512 * 512 * 4
    numbers, receive = iter(range(100)), Link.receive

    def noting(self, tensors):
        if self.rank > 0 and tensors and next(numbers) == 4:  # the first forwards are checked at length
            torch.cuda.reset_peak_memory_stats()
        receive(self, tensors)

    Link.receive = noting
    exec(os.environ["TWIN"])
    torch.found = None
    run_single_process("script", os.environ["SCRIPT"], [], num_microbatches=8)
    in_worker = torch.cuda.max_memory_allocated() / (16 * 512 * 512 * 4) - 1  # of its copy of the model
    print("FOUND", json.dumps(torch.found or [in_worker, [], None]))
"""


def memory(folder, kind, devices, twin=""):
    """By rank: the memory of a shared-out script's steps beside the parameters, in G, the host's waits, the digest."""
    script = folder / f"{kind}.py"
    script.write_text(f"kind = {kind!r}\n{dedent(MEMORY)}")
    variables = {"SCRIPT": str(script), "TWIN": dedent(twin), "OMP_NUM_THREADS": "1"}
    outputs = gpus.run_processes(AS_RANK, *gpus.places(devices), devices=devices, **variables)
    return [json.loads(output.partition("FOUND ")[2]) for output, _ in outputs]


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory):
    """The measurements of one GPU, by the kind of script."""
    folder = tmp_path_factory.mktemp("memory")
    return {
        kind: memory(folder, kind, 1)[0] for kind in ("plain", "DataParallel", "accumulation", "second derivatives")
    }


# Plain PyTorch has the gradient: 1.0 G. A tree of eight leaves has three sums at most; one bucket is a sixteenth.
@pytest.mark.parametrize(
    ("kind", "devices", "most"),
    [
        ("plain", 1, 3.3),
        ("plain", 4, 1.5),
        ("DataParallel", 1, 3.3),
        ("accumulation", 1, 4.3),  # the gradient of the first part is there meanwhile
        ("accumulation", 2, 3.3),
        ("second derivatives", 1, 13.5),  # those of all its microbatches, by the documentation
    ],
)
def test_a_script_that_is_shared_out_holds_the_sums_of_the_tree_and_no_gradient_for_each_microbatch(
    on_one_gpu, tmp_path, kind, devices, most
):
    alone = on_one_gpu[kind]
    for found, waits, digest in [alone] if devices == 1 else memory(tmp_path, kind, devices):
        assert found < most
        assert waits == []
        assert digest in (alone[2], None)


AT_ONCE = """
    from contextlib import nullcontext

    made = calls.ChunkCall
    calls.ChunkCall = lambda inputs, outputs: made(inputs, outputs, nullcontext)
"""


def test_gradients_that_are_not_added_up_at_once_are_noticed(on_one_gpu, tmp_path):
    ((found, _, digest),) = memory(tmp_path, "plain", 1, AT_ONCE)
    assert found > on_one_gpu["plain"][0] + 0.8
    assert digest == on_one_gpu["plain"][2]


# A convolution's best kernel needs 8 of 64 MiB.
SHORT = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = torch.empty(64 - free << 20, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(16, 3, 8, 8, device="cuda")).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("free", [4, 48])
def test_a_script_in_whose_backward_cudnn_got_no_workspace_ends_with_a_sentence(tmp_path, free):
    script = tmp_path / "short.py"
    script.write_text(f"free = {free}\n{dedent(SHORT)}")
    program = f"""
        from samestep.errors import DeterminismError
        from samestep.scripts.single_process import run_single_process

        try:
            run_single_process("script", {str(script)!r}, [], num_microbatches=2)
        except DeterminismError as error:
            print(error)
        else:
            print("the end")
    """
    size = {"FAKE_CUDA_MEMORY_MIB": "64", "FAKE_CUDA_WORKSPACE_MIB": "8", "OMP_NUM_THREADS": "1"}
    said = gpus.run(program, devices=1, **size)
    if free == 48:
        assert said == "the end\n"
    else:
        assert said.startswith("the memory of cuda:0 was short ")
        assert " in the backward of a wrapped forward on cuda:0, which went on: cuDNN leaves out a kernel " in said
        assert "Let it need less: smaller chunks (--logical-devices" in said


BESIDE_FROZEN_WEIGHTS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6200), nn.Linear(6200, 6200), nn.Linear(6200, 1)).cuda()
model[1].requires_grad_(False)  # 147 of 256 MiB
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 4, device="cuda")).square().mean().backward()
    optimizer.step()
print("the end")
"""


def test_a_model_that_fits_the_gpu_once_is_compared_all_the_same(tmp_path):
    script = tmp_path / "frozen.py"
    script.write_text(dedent(BESIDE_FROZEN_WEIGHTS))
    program = f"""
        from samestep.scripts.single_process import run_single_process

        run_single_process("script", {str(script)!r}, [], num_microbatches=2)
    """
    assert gpus.run(program, devices=1, FAKE_CUDA_MEMORY_MIB="256", OMP_NUM_THREADS="1") == "the end\n"
