"""Runs other projects' tests in the ranks of torchrun and of `samestep run --logical-devices`, and compares.

    python tests/conformance/conformance.py [--suites PATTERN] [--sources FOLDER] [--devices cpu:1,cpu:2] [--page]

What passes under torchrun has to pass on each of the devices. Prints a line a suite and every difference; --page keeps
the figures in results.json and writes docs/conformance.md. FOLDER holds checkouts of the projects whose tests are in no
package, each in a folder of the project's name; without it their suites are left out, with a line.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from peer_suites import PROGRAMS, PYTORCH, REASONS, SUITES, Suite

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parents[1] / "docs" / "conformance.md"
TORCHRUN = "torchrun"
SCRIPT_SECONDS, REFERENCE_SECONDS, TEST_SECONDS, END_SECONDS = 300, 40, 120, 30
ATTEMPTS = 2  # of a test on devices, and of a script: some wait for tenths of a second, which a busy machine takes
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
# in_rank.py names GPUs, for which samestep simulates some, unless the variable asks for CPUs.
ON_CPUS, ON_GPUS = {"ACCELERATE_USE_CPU": "true"}, {"BACKEND": "nccl", "FAKE_CUDA_DEVICES": "8"}
FAKE_CUDA = HERE.parent / "fake_cuda" / "dist-packages"
ENDED_BADLY = ("hangs", "fails", "waits")


@dataclass
class Compared:
    """A suite with a number of ranks: what passes under torchrun, and what of it does not on the devices."""

    suite: Suite
    ranks: int
    passed: list[str]
    skipped: int = 0
    failed: dict[str, dict[str, str]] = field(default_factory=dict)  # by devices, then test: what it did instead

    @property
    def unexplained(self) -> list[str]:
        """The tests of a difference without a reason."""
        return sorted({test for tests in self.failed.values() for test in tests if test not in REASONS})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suites; 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="", help="those whose name has this pattern")
    parser.add_argument("--sources", type=Path, help="the folder of the checkouts")
    parser.add_argument("--devices", default="cpu:1,cpu:2")
    parser.add_argument("--page", action="store_true", help="writes the page and the figures")
    options = parser.parse_args(arguments)
    compared = []
    for suite in SUITES:
        if not re.search(options.suites, suite.name):
            continue
        root = Path()
        if suite.checkout:
            root = (options.sources or Path()) / suite.checkout
            if options.sources is None or not root.is_dir():
                print(f"{suite.name}: left out, --sources has no {suite.checkout}")
                continue
        for ranks in suite.ranks:
            compared.append(compare(suite, ranks, options.devices.split(","), root.resolve()))
            say(compared[-1])
            if options.page:
                write_page(compared[-1:])
    return 1 if any(each.unexplained for each in compared) else 0


def compare(suite: Suite, ranks: int, devices: Sequence[str], root: Path = Path()) -> Compared:
    """Runs a suite under torchrun, then what passed there on the devices; what scripts write has the same bits."""
    with tempfile.TemporaryDirectory(prefix="samestep-conformance-") as name:
        return _compare(suite, ranks, devices, root, Path(name))


def _compare(suite: Suite, ranks: int, devices: Sequence[str], root: Path, written: Path) -> Compared:
    reference = run(suite, ranks, TORCHRUN, root, None, written)
    failed = [test for test, outcome in reference.items() if outcome == "fails" and suite.kind == "script"]
    reference |= run(suite, ranks, TORCHRUN, root, failed, written) if failed else {}
    passed = [test for test, outcome in reference.items() if outcome == "passes"]
    result = Compared(suite, ranks, passed, sum(outcome == "skips" for outcome in reference.values()))
    for each in devices:
        failed = passed
        for _ in range(ATTEMPTS):
            if failed:
                outcomes = run(suite, ranks, each, root, failed, written)
                failed = [test for test in failed if outcomes.get(test) != "passes"]
        result.failed[each] = {test: outcomes.get(test, "is not run") for test in failed}
        if suite.kind == "script":
            for test in passed:
                if bits(written / each / test) != bits(written / devices[0] / test):
                    result.failed[each].setdefault(test, f"has other bits than on {devices[0]}")
    return result


def bits(folder: Path) -> dict[str, str]:
    """A digest of each file of weights, gradients and losses in a folder."""
    files = [path for pattern in ("*.safetensors", "*losses.json", "result.pt") for path in folder.rglob(pattern)]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run(suite: Suite, ranks: int, launcher: str, root: Path, only: list[str] | None, written: Path) -> dict[str, str]:
    """The outcome of each test under a launcher; scripts write into a folder of theirs in `written`."""
    if suite.kind == "script":
        made, outcomes = written / "made", {}
        for source in suite.sources if only is None else only:
            arguments, output = PROGRAMS.get(source, f"-m {source}"), written / launcher / source
            if "{made}" in arguments and not made.exists():
                importlib.import_module("tiny").write_tiny(made)
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
            places = {"made": made, "output": output}
            program = [word.format(**places) for word in arguments.split()]
            outcomes[source] = script_outcome(launched(launcher, ranks, program))
        return outcomes
    places = ",".join(
        [str(path) for source in suite.sources for path in sorted(root.glob(source))]
        if suite.checkout
        else suite.sources
    )
    paths = [str(root / "test")] if suite.checkout else []
    if suite.on_gpus and launcher == TORCHRUN:
        paths.append(str(FAKE_CUDA))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(ON_GPUS if suite.on_gpus else ON_CPUS)}
    with tempfile.TemporaryDirectory(prefix="samestep-conformance-") as name:
        folder = Path(name)
        tests = []
        if only is not None:
            (folder / "only").write_text("\n".join(only))
            tests = [str(folder / "only")]
        lines: list[list[dict[str, str]]] = [[] for _ in range(ranks)]
        first, limit = 0, REFERENCE_SECONDS if launcher == TORCHRUN else TEST_SECONDS
        while True:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            (folder / "temp").mkdir(exist_ok=True)
            arguments = [suite.kind, places, name, str(store.port), str(first), str(limit), *tests]
            command = launched(launcher, ranks, [str(HERE / "in_rank.py"), *arguments])
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
            lines = [
                [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
                for path in (folder / f"{rank}.jsonl" for rank in range(ranks))
            ]
            begun = len({line["test"] for of_rank in lines for line in of_rank})
            if ended.returncode == 0:
                return {test: outcome(test, lines) for test in dict.fromkeys(line["test"] for line in lines[0])}
            if begun == first:  # no test has begun: it is the launcher that fails, or a test's module
                raise RuntimeError(f"{suite.name} under {launcher} ends before a test:\n{ended.stderr[-3000:]}")
            first = begun


def launched(launcher: str, ranks: int, program: list[str]) -> list[str]:
    """The command that runs a program in so many ranks."""
    module = [sys.executable, "-m"]
    if launcher == TORCHRUN:
        return [*module, "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    return [*module, "samestep", "run", "--devices", launcher, "--logical-devices", str(ranks), *program]


def script_outcome(command: list[str]) -> str:
    """Whether a program exits with 0; a launcher whose program hangs has some seconds in which to end its ranks."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=OFFLINE) as launcher:
        try:
            return "fails" if launcher.wait(SCRIPT_SECONDS) else "passes"
        except subprocess.TimeoutExpired:
            launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(END_SECONDS)
            launcher.kill()
            return "hangs"


def outcome(test: str, lines: list[list[dict[str, str]]]) -> str:
    """The outcome of a test of several ranks: the worst."""
    told = [[line["outcome"] for line in of_rank if line["test"] == test] for of_rank in lines]
    found = {each for of_rank in told for each in of_rank}
    bad = next((each for each in ENDED_BADLY if each in found), None)
    if bad is not None:
        return bad
    if any(of_rank[-1:] in ([], ["begin"]) for of_rank in told):
        return "ends its process"
    return "passes" if "passes" in found else "skips"


def say(compared: Compared) -> None:
    """A line, and one for each difference."""
    name = f"{compared.suite.name}, {compared.ranks} ranks"
    same = ", ".join(f"{devices} {len(compared.passed) - len(bad)}" for devices, bad in compared.failed.items())
    print(f"{name}: torchrun {len(compared.passed)}, {same}; {compared.skipped} skipped", flush=True)
    for devices, bad in compared.failed.items():
        for test, what in bad.items():
            print(f"  {devices}: {test} {what}: {REASONS.get(test, 'NO REASON')}", flush=True)


def write_page(compared: list[Compared]) -> None:
    """Keeps the figures of these suites, and makes the page of all that are kept."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for each in compared:
        kept[f"{each.suite.name}, {each.ranks}"] = {
            "suite": each.suite.name,
            "version": each.suite.checkout or f"{each.suite.package} {importlib.metadata.version(each.suite.package)}",
            "torch": importlib.metadata.version("torch"),
            "ranks": each.ranks,
            "skipped": each.skipped,
            "passed": len(each.passed),
            "failed": each.failed,
        }
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    rows, differences = [], []
    for _, entry in sorted(kept.items()):
        same = [f"{devices}: {entry['passed'] - len(bad)}" for devices, bad in sorted(entry["failed"].items())]
        rows.append(
            f"| {entry['suite']} | {entry['version']} | {entry['ranks']} | {entry['passed']} | {', '.join(same)} |"
        )
        for test in sorted({test for bad in entry["failed"].values() for test in bad}):
            told = {bad[test] for bad in entry["failed"].values() if test in bad}
            differences.append(f"| `{test}` | {', '.join(sorted(told))} | {REASONS.get(test, 'not known yet')} |")
    total = sum(entry["passed"] for entry in kept.values())
    same_in_all = total - len(differences)
    PAGE.write_text(
        HEAD.format(
            total=total,
            same=same_in_all,
            rows="\n".join(rows),
            differences="\n".join(differences),
            tests_of=PYTORCH.removeprefix("pytorch-v"),
            torch=importlib.metadata.version("torch").partition("+")[0],
        )
    )


HEAD = """# Conformance

<!-- Written by `make conformance PAGE=1`. -->

That one, two and three devices agree shows that samestep agrees with itself. Whether it agrees with the field is what
other projects' own tests say. They run here unchanged, in the ranks of torchrun and in the ranks of
`samestep run --logical-devices`, on one device and on two. **{same} of {total} that pass under torchrun pass on each.**

```bash
make conformance                  # what installed packages have, on one device and on two; PAGE=1 writes this page
make conformance SOURCES=FOLDER   # all of it
```

| tests | version | ranks | pass under torchrun | of these under samestep |
|---|---|---|---|---|
{rows}

FOLDER holds the release archives of PyTorch, torchmetrics and Ignite, unpacked, each in a folder of the name that the
table has as its version. torchmetrics' tests need the packages `cachier` and `pytest-doctestplus`, Ignite's need
`pytorch-ignite`. The tests of PyTorch {tests_of} run with torch {torch}. TRL's scripts get a tiny model and rows of
text in place of what they would download; what they save has the same bits on each of the devices.

A test is not counted that under torchrun fails (so do some of an older PyTorch), skips itself, or makes no group of the
ranks. Where PyTorch's tests ask for GPUs in a decorator alone, they are tried on CPUs. Those "on GPUs" run under
torchrun on the fake GPUs of `tests/fake_cuda` and their NCCL, and under samestep on simulated ones. The launcher's
ranks take the place of the processes that tests start themselves, and every test has a group of its own.

| what differs | it | why |
|---|---|---|
{differences}
"""

if __name__ == "__main__":
    sys.exit(main())
