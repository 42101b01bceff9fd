"""One rank of other projects' distributed tests: test after test, in the ranks of a launcher.

    torchrun --nproc-per-node 3 in_rank.py torch MODULES|FILES FOLDER PORT FIRST LIMIT [TESTS]
    torchrun --nproc-per-node 2 in_rank.py pytest FILES FOLDER PORT FIRST LIMIT [TESTS]

The ranks take the place of the processes that torch's test classes start, or the tests of torchmetrics and Ignite,
which pytest collects; each test has a group of its own. FOLDER takes one line of JSON a test and rank, PORT is the port
of the store by which ranks meet beside their group, FIRST the test to begin with, LIMIT the seconds of a test, TESTS a
file with the names of the tests to run. All ranks leave when a test does not end on some of them.
"""

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KIND, SOURCES, FOLDER, PORT, FIRST = sys.argv[1], sys.argv[2].split(","), Path(sys.argv[3]), *map(int, sys.argv[4:6])
LIMIT = float(sys.argv[6])  # seconds, of a test
BACKEND = os.environ.setdefault("BACKEND", "gloo")  # torch's tests read it, too
ON_GPUS = BACKEND == "nccl"
BACKENDS = "cpu:gloo,cuda:nccl" if ON_GPUS else BACKEND
os.environ["TEMP_DIR"] = str(FOLDER / "temp")
os.environ["PYTEST_REFERENCE_CACHE"] = str(
    FOLDER / f"references.{RANK}"
)  # torchmetrics', of the results to compare with

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _pytest.runner import runtestprotocol  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.testing._internal import common_device_type, common_distributed, common_fsdp, common_utils  # noqa: E402

OTHERS = 10.0  # seconds for the other ranks to end a test that failed on one
FAILED = 3
Outcome = tuple[str, str]  # passes, skips or fails; the text

common_fsdp.DEVICE_COUNT = SIZE
common_device_type.CUDATestBase._do_cuda_non_default_stream = False  # the policy sets one by torch._C
for name in ("requires_nccl", "requires_accelerator_dist_backend", "skip_if_lt_x_gpu"):
    setattr(common_distributed, name, lambda *_, **__: lambda test: test)  # whether it passes on CPUs is tried
STORE = dist.TCPStore("127.0.0.1", PORT, is_master=False, timeout=datetime.timedelta(seconds=LIMIT + 60))

GROUPS: list[Any] = []  # that the present test has made
update_default_group = distributed_c10d._update_default_pg


def note_group(group: Any) -> None:
    """Notes the default group."""
    GROUPS.extend([group] if group is not None else [])
    update_default_group(group)


distributed_c10d._update_default_pg = note_group


def main() -> None:
    """Runs the tests of the sources."""
    common_utils.set_rng_seed()  # of the numbers that modules draw: every rank has the same
    if KIND == "pytest":
        arguments = ["-q", *(f"-pno:{name}" for name in ("cacheprovider", "xdist", "timeout")), *SOURCES]
        ended = pytest.main(arguments, plugins=[InRanks()])
        sys.exit(0 if ended == pytest.ExitCode.TESTS_FAILED else ended)  # so it is where a file cannot be imported
    named = {
        f"{Path(source).stem + '.' if source.endswith('.py') else ''}{case.__name__}.{name}": (case, name)
        for source in SOURCES
        for case in test_classes(source)
        for name in tests_of(case)
    }
    run_all(list(named), lambda name: torch_outcome(*named[name], name))


def run_all(names: list[str], outcome_of: Callable[[str], Outcome]) -> None:
    """Runs the tests, until one waits for ever."""
    if len(sys.argv) > 7:
        only = set(Path(sys.argv[7]).read_text().split("\n"))
        names = [name for name in names if name in only]
    with (FOLDER / f"{RANK}.jsonl").open("a", buffering=1) as lines:
        for index in range(FIRST, len(names)):
            meet(f"{index}/begin")
            faulthandler.dump_traceback_later(LIMIT + 60, exit=True)  # where no thread of Python gets its turn
            write(lines, test=names[index], outcome="begin")
            began, ended = time.monotonic(), threading.Event()
            watcher = threading.Thread(target=watch, args=(lines, names[index], index, ended), daemon=True)
            watcher.start()
            GROUPS.clear()
            if ON_GPUS:
                torch.cuda.set_device(RANK)
            common_utils.set_rng_seed()
            outcome, text = outcome_of(names[index])
            if outcome == "passes" and not GROUPS:
                outcome, text = "skips", "it has no group of the ranks"
            seconds = round(time.monotonic() - began, 2)
            write(lines, test=names[index], outcome=outcome, text=text[-6000:], seconds=seconds)
            if outcome == "fails":
                STORE.set(f"{index}/failed", "1")
                with contextlib.suppress(Exception):
                    end_group()  # the others do not wait for it
            meet(f"{index}/end")
            ended.set()
            watcher.join()
            end_group()  # of all ranks: one that waits for another's message has got it
    faulthandler.cancel_dump_traceback_later()
    meet("done")


def watch(lines: Any, name: str, index: int, ended: threading.Event) -> None:
    """Leaves the process when a test takes too long, here or on a rank that has failed."""
    began, failed = time.monotonic(), 0.0
    while not ended.wait(0.2):
        now = time.monotonic()
        if not failed and STORE.check([f"{index}/failed"]):
            failed = now
        if now - began > LIMIT or (failed and now - failed > OTHERS):
            with (FOLDER / f"stack.{RANK}").open("w+") as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                write(lines, test=name, outcome="waits" if failed else "hangs", text=file.read()[-6000:])
            STORE.set(f"{index}/failed", "1")
            os._exit(FAILED)


def meet(name: str) -> None:
    """Waits until every rank is here."""
    STORE.set(f"{name}/{RANK}", "1")
    STORE.wait([f"{name}/{rank}" for rank in range(SIZE)])


def write(lines: Any, **entry: Any) -> None:
    """One line of JSON."""
    lines.write(json.dumps(entry) + "\n")


# torch's test classes


OF_RANKS = (
    common_distributed.MultiProcessTestCase,
    common_distributed.MultiThreadedTestCase,
    common_distributed.MultiProcContinuousTest,
)
WITH_GROUP = ("TestDistBackend", "FSDPTest", "MultiThreadedTestCase", "MultiProcContinuousTest")
SKIPS = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


def test_classes(source: str) -> list[type]:
    """The test classes of a module or a file; one that this torch cannot import has none."""
    path = Path(source)
    try:
        if path.suffix == ".py":
            sys.path[:0] = [str(path.parent)]
            name = "_".join(path.parts[-2:])[:-3]
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except (Exception, SystemExit) as error:
        print(f"{source} is left out: {type(error).__name__}: {error}")
        return []
    if hasattr(module, "DistributedTest"):
        return [distributed_test(module)]
    cases = [each for _, each in sorted(vars(module).items()) if inspect.isclass(each)]
    return [each for each in cases if issubclass(each, OF_RANKS) and each.__module__ == module.__name__]


def distributed_test(module: ModuleType) -> type:
    """The class that torch's distributed_test.py is made of for a backend."""
    module.PROFILING_SUPPORTED_BACKENDS = []  # the events of a trace have the names of a backend
    met: list[int] = []

    def sync(*_: Any, **__: Any) -> None:
        met.append(0)
        meet(f"barrier/{FIRST}/{len(met)}")

    module.Barrier.sync = sync  # it counts the files of processes that its own launcher has started
    for folder in ("barrier", "test_dir"):
        (FOLDER / "temp" / folder).mkdir(parents=True, exist_ok=True)
    return type("TestDistributed", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def tests_of(case: type) -> list[str]:
    """The names of a class's tests."""
    return sorted(name for name in dir(case) if name.startswith("test"))


def torch_outcome(case: Any, name: str, key: str) -> Outcome:
    """The outcome of a test of torch's on this rank."""
    for skipped in (case, getattr(case, name)):
        if getattr(skipped, "__unittest_skip__", False):
            return "skips", str(skipped.__unittest_skip_why__)
    try:
        with group(case, name, key) as test:
            getattr(test, name)()
    except unittest.SkipTest as skip:
        return "skips", str(skip)
    except SystemExit as stop:
        if stop.code in SKIPS:
            return "skips", SKIPS[stop.code]
        return ("passes", "") if stop.code in (0, None) else ("fails", f"exit code {stop.code}")
    except BaseException:
        return "fails", traceback.format_exc()
    return "passes", ""


@contextlib.contextmanager
def group(case: Any, name: str, key: str) -> Iterator[Any]:
    """The test as its own processes make it, with the number of ranks that there are, and its group."""
    bases = {each.__name__ for each in case.__mro__}
    if isinstance(inspect.getattr_static(case, "world_size", None), int):
        case.world_size, case.rank = SIZE, RANK
    else:
        own = {"world_size": property(lambda _: SIZE), "__module__": case.__module__}
        case = type(case.__name__, (case,), own)
    test = case(name)
    test.rank, test.file_name = RANK, str(FOLDER / "temp" / f"meet-{key}")
    Path(test.file_name).parent.mkdir(parents=True, exist_ok=True)
    if bases & set(WITH_GROUP):
        seconds = datetime.timedelta(seconds=LIMIT - 10)
        dist.init_process_group(
            BACKENDS, store=dist.PrefixStore(key, STORE), rank=RANK, world_size=SIZE, timeout=seconds
        )
    if "MultiProcContinuousTest" in bases:
        case.pg = dist.group.WORLD
    if "MultiThreadedTestCase" in bases:
        case.global_store = dist.PrefixStore(f"{key}/global", STORE)
        test.perThreadSetUp()
    yield test
    if "MultiThreadedTestCase" in bases:
        test.perThreadTearDown()


def end_group() -> None:
    """Ends the group, if the test has not."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)


# The tests of torchmetrics and of Ignite; pytest collects them


class InRanks:
    """A plugin of pytest that runs each test as torch's are run; the ranks are the processes that share its work."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """The functions that make a group by a port of their own make it of the ranks."""
        pytest.pool = RankOfPool()  # type: ignore[attr-defined]
        for name in ("unittests", "unittests.conftest"):
            if name in sys.modules:
                sys.modules[name].setup_ddp = group_anew  # type: ignore[attr-defined]
        if "tests.ignite.conftest" in sys.modules:
            ignite: Any = sys.modules["tests.ignite.conftest"]
            ignite._setup_free_port = lambda _: 0
            ignite._create_dist_context = lambda *_: group_anew(RANK, SIZE)

    @pytest.fixture(scope="session")
    def worker_id(self) -> str:
        """By which Ignite's tests find their rank, in place of pytest-xdist's."""
        return f"gw{RANK}"

    def pytest_runtestloop(self, session: Any) -> bool:
        """All tests of more than one process."""
        of_ranks = [
            item for item in session.items if {"DDP", "distributed"} & {mark.name for mark in item.iter_markers()}
        ]
        named = {item.nodeid: item for item in of_ranks}

        def outcome_of(name: str) -> Outcome:
            reports = runtestprotocol(named[name], log=False, nextitem=None)
            bad = [report for report in reports if report.failed]
            if bad:
                return "fails", bad[0].longreprtext
            return ("skips" if any(report.skipped for report in reports) else "passes"), ""

        run_all(list(named), outcome_of)
        return True


class RankOfPool:
    """A pool of processes, as one of its ranks."""

    def map(self, function: Callable[..., Any], values: Any) -> list[Any]:
        """The function of this rank's value."""
        return self.starmap(function, [(value,) for value in values])

    def starmap(self, function: Callable[..., Any], values: Any) -> list[Any]:
        """The function of this rank's values."""
        if not dist.is_initialized():
            group_anew(RANK, SIZE)
        return [function(*list(values)[RANK])]


NUMBERS = itertools.count()


def group_anew(rank: int, world_size: int) -> dict[str, int]:
    """A group of the ranks, in place of the one that there is."""
    assert (rank, world_size) == (RANK, SIZE)
    end_group()
    store = dist.PrefixStore(f"group/{FIRST}/{next(NUMBERS)}", STORE)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    return {"local_rank": rank, "rank": rank, "world_size": world_size}


main()
