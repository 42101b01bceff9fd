"""What all tests share: pools of real processes, the data folder, and a check that nothing is left behind."""

import compileall
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # workers are forked from a process without threads
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on cores that others use too, threads spin while they wait for another
if "PYTEST_XDIST_WORKER" not in os.environ:  # not the home's, with the key by which runs are known as one's own
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix=f"samestep-state-{os.getpid()}-")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts it so in the background, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:  # this one likewise
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup does, and processes that wait for one would wait in vain
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hypothesis
import numpy as np
import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent / "fake_cuda" / "dist-packages"))

import fake_cuda
import forked
from tiers import LONG_FILES, SLOW, SLOW_ON_GPUS, SMOKE, is_of_the_other_run, name_of, starts_processes, watch
from worlds import DEVICE, World, close_mesh

hypothesis.settings.register_profile("samestep", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("samestep")

SHARED_DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
SOURCE = Path(__file__).resolve().parents[1] / "src"
GPUS_ARE_REQUIRED = bool(os.environ.get("SAMESTEP_TEST_NEEDS_FAKE_GPUS"))  # else tests on them are skipped without them
ON_FAKE_GPUS = "on fake GPUs"

PRECISIONS = [("generic", "all"), *((b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn"))]


def pytest_configure(config):
    """Compiles the package: without bytecode files, each of hundreds of programs would do so anew."""
    if "FAKE_CUDA_DEVICES" in os.environ and fake_cuda.cannot_be():
        pytest.exit(fake_cuda.cannot_be(), returncode=0)
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(SOURCE, quiet=2)


def pytest_unconfigure(config):
    """Removes the key of the tests; a pytest that a test starts leaves that of the tests around it."""
    if Path(os.environ["XDG_STATE_HOME"]).name.startswith(f"samestep-state-{os.getpid()}-"):
        shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the tests of `make test`; files with many others come first: a long one at the end is waited for."""
    if DEVICE == "cuda":
        config.hook.pytest_deselected(items=[item for item in items if is_of_the_other_run(item)])
        items[:] = [item for item in items if not is_of_the_other_run(item)]
    files, reason = Counter(), fake_cuda.cannot_be()
    if not reason and not GPUS_ARE_REQUIRED and not fake_cuda.is_built():
        reason = "the fake CUDA device is not built: make fake-cuda"
    for item in items:
        if item.get_closest_marker("fake_gpus") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if name_of(item) in SLOW:
            item.add_marker("slow")
        if starts_processes(item):
            files[item.path] += 100 if name_of(item).partition("::")[0] in LONG_FILES else 1
            if name_of(item) in SMOKE:
                item.add_marker("quick")
        elif item.get_closest_marker("slow") is None and not (DEVICE == "cuda" and name_of(item) in SLOW_ON_GPUS):
            item.add_marker("quick")
    items.sort(key=lambda item: -files[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """No test of `make test` starts a program unless it is listed. Notes what runs on fake GPUs."""
    with watch(item):
        before = _num_kernels()
        result = yield
        uses_them = item.get_closest_marker("fake_gpus") or (DEVICE == "cuda" and "worlds" in item.fixturenames)
        if uses_them or _num_kernels() > before:
            item.user_properties.append((ON_FAKE_GPUS, True))
        return result


def _num_kernels():
    """The number of kernels that this process has launched on fake GPUs."""
    return fake_cuda.counts()[1] if "FAKE_CUDA_DEVICES" in os.environ else 0


def pytest_terminal_summary(terminalreporter):
    """Says how many tests have passed on fake GPUs."""
    passed = terminalreporter.stats.get("passed", [])
    count = sum([ON_FAKE_GPUS, True] in map(list, report.user_properties) for report in passed)
    if count or DEVICE == "cuda":
        terminalreporter.write_line(f"{count} tests passed on fake GPUs")


@pytest.fixture(scope="session")
def worlds():
    """`worlds(n, transport, nodes)`: a pool of n real processes that talk to each other, started when first asked for.

    They share memory if possible, unless the transport is "gloo". With `nodes=(2, 2)` they are as on two nodes.
    """
    pool = {}

    def get(world_size, transport="auto", nodes=None):
        key = (world_size, transport, nodes)
        if key not in pool:
            pool[key] = World(world_size, transport, nodes)
        return pool[key]

    yield get
    for world in pool.values():
        world.close()


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data beside the checkout; the test is skipped where there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder of real data, ../shared/data, is not here")
    return SHARED_DATA.resolve()


@pytest.fixture
def refused(capsys, monkeypatch):
    """`refused(*words)`: calls `samestep WORDS` here, which must be bad usage; returns the message on stderr."""
    from samestep.cli.main import main

    def call(*words):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["samestep", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert (caught.value.code, said.out) == (2, "")
        return said.err

    return call


@pytest.fixture(autouse=True)
def _nothing_left_behind(request):
    """Fails a test that leaves processes or changed environment variables behind; puts torch's switches back."""
    environment = dict(os.environ)
    pooled = "worlds" in request.fixturenames
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = torch.get_num_threads()
    precisions = {place: torch._C._get_fp32_precision_getter(*place) for place in PRECISIONS}
    drawing = np.random.get_bit_generator()
    yield
    if np.random.get_bit_generator() is not drawing:  # ranks that take turns put it back in each other's place
        np.random.set_bit_generator(drawing)
    torch.set_float32_matmul_precision("highest")  # by the older names first, which set the others, too
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False
    for place, precision in precisions.items():
        torch._C._set_fp32_precision_setter(*place, precision)
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = True
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    changed -= {
        "PYTEST_CURRENT_TEST",
        "CUBLAS_WORKSPACE_CONFIG",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_DETERMINISTIC",
        "KINETO_LOG_LEVEL",
    }  # set by torch
    assert not changed, f"environment variables changed: {sorted(changed)}"
    if not pooled:
        close_mesh()  # FSDP2 on one rank opens a process group in this process
        before |= forked.SERVER_PIDS  # which stay for later tests
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        alive = [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert not alive, f"processes left behind: {alive}"
