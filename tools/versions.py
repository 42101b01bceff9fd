"""Tries samestep on a version of Python and of torch: in an environment made for it, outside of the checkout.

    python3.13 tools/versions.py 2.15.0                      the Python that runs this file, with torch 2.15.0
    python3.13 tools/versions.py 2.15.0 --short --write      fewer tests; the row goes into docs/installation.md
    python3.13 tools/versions.py 2.15.0 --environment DIR --prepare     only what is downloaded; DIR is kept

Run are `make train`'s program; its LeNet with portable kernels on one device and on three, whose digests must be equal;
a script of DistributedDataParallel on four logical devices; then the tests of `make test`, its smoke tests over
processes among them, or with --short those of SHORT. All of it is on CPUs: GPUs are hidden. Exit code 0 if all passed.
"""

import argparse
import ast
import datetime
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "installation.md"
HEAD = "| Python | PyTorch | tests | passed | skipped | failed | on |\n|---|---|---|---|---|---|---|\n"
# With the smoke tests: what depends most on the insides of Python and torch, shards over processes too.
SHORT = [
    "checkpoint/test_contract.py",
    "engine/test_deterministic_kernels.py",
    "engine/test_invariance.py",
    "engine/test_portable_kernels.py",
    "scripts/test_simulated_tensors.py",
    "sharding/test_sharded_bits.py::test_a_sharded_state_has_the_bits_of_one_device[sharded-3-{}]",
    "test_interface.py",
]


def unpinned(constraints: str) -> str:
    """The constraints without torch, which is given, and without NumPy, whose releases leave out some Pythons."""
    return re.sub(r"^(?:torch|numpy)==.*\n", "", constraints, flags=re.MULTILINE)


def prepare(environment: Path, torch: str) -> None:
    """Makes the environment with that torch, samestep and its packages of development, unless it is there."""
    if (environment / "bin" / "samestep").exists():  # it is installed last
        return
    venv.create(environment, with_pip=True)
    pins = environment / "constraints.txt"
    pins.write_text(unpinned((ROOT / "constraints.txt").read_text("utf-8")) + f"torch=={torch}\n", "utf-8")
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, f"torch==={torch}"], check=True)
    subprocess.run([*pip, "--constraint", pins, "--editable", f"{ROOT}[dev]"], check=True)


def smoke() -> list[str]:
    """The smoke tests of tests/tiers.py, which imports torch and so is only read here."""
    for node in ast.parse((ROOT / "tests" / "tiers.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SMOKE":
            return sorted(ast.literal_eval(node.value))
    raise LookupError("tests/tiers.py has no set SMOKE")


def digest_of(output: str) -> str:
    """The digest that `samestep train` prints."""
    found = re.search(r"^digest +([0-9a-f]{64})", output, re.MULTILINE)
    if found is None:
        sys.exit(f"a training printed no digest:\n{output}")
    return found[1]


def train(environment: Path, variables: dict[str, str]) -> None:
    """Runs the programs of the README; one that fails, and two digests that differ, end this program."""

    def printed(*words: str) -> str:
        command = [environment / "bin" / "samestep", *words]
        done = subprocess.run(command, cwd=environment, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"samestep {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    digest_of(printed("train", "lenet"))
    digest, other = (
        digest_of(printed("train", "lenet", "--portable", "--epochs", "2", "--devices", on))
        for on in ("cpu:1", "cpu:3")
    )
    if digest != other:
        sys.exit(f"samestep train lenet --portable: {digest} on cpu:1, {other} on cpu:3")
    ddp = str(ROOT / "examples" / "ddp.py")
    one, two = (printed("run", "--logical-devices", "4", "--devices", on, ddp) for on in ("cpu:1", "cpu:2"))
    if one != two or "epoch 5" not in one:
        sys.exit(f"samestep run --logical-devices 4: on cpu:1\n{one}on cpu:2\n{two}")
    print(f"trained: digest {digest}", flush=True)


def test(environment: Path, variables: dict[str, str], tests: list[str]) -> dict[str, int]:
    """Runs these tests but the slow ones, or else those of `make test`; their numbers by outcome."""
    results, marked = environment / "results.xml", "not slow" if tests else "quick"
    command = [environment / "bin" / "python", "-m", "pytest", "-m", marked, "-q", f"--junit-xml={results}", *tests]
    done = subprocess.run(command, cwd=ROOT, env=variables, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest: exit code {done.returncode}")
    if missing := not_run(results.read_text("utf-8"), tests):
        sys.exit(f"pytest ran no test of {', '.join(missing)}")
    return counts(results.read_text("utf-8"))


def not_run(results: str, tests: list[str]) -> list[str]:
    """The tests, and the files of tests, of which pytest's XML has none."""
    cases = [(case.get("classname"), case.get("name")) for case in ElementTree.fromstring(results).iter("testcase")]
    ran = {f"{module}::{name}" for module, name in cases} | {module for module, _ in cases}
    parts = [(each, *each.partition("::")) for each in tests]
    return [each for each, file, *name in parts if "".join([file[:-3].replace("/", "."), *name]) not in ran]


def counts(results: str) -> dict[str, int]:
    """The numbers of tests by outcome, from pytest's XML."""
    suites = [{name: int(value) for name, value in suite.items() if value.isdigit()} for suite in
              ElementTree.fromstring(results).iter("testsuite")]  # fmt: skip
    total = {name: sum(suite[name] for suite in suites) for name in ("tests", "skipped", "failures", "errors")}
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - total["skipped"] - failed, "skipped": total["skipped"], "failed": failed}


def with_row(page: str, python: str, torch: str, cells: tuple[object, ...]) -> str:
    """The page with a row for this pair in its table, in the place of an earlier one."""
    before, head, after = page.partition(HEAD)
    if not head:
        raise ValueError(f"{PAGE} has no table of versions, which begins with {HEAD.splitlines()[0]}")
    table = re.match(r"(?:\|.*\n)*", after)
    rows = {tuple(row.split(" | ")[:2]): row for row in (table[0] if table else "").splitlines()}
    row = f"| {' | '.join(map(str, (python, torch, *cells)))} |"
    rows[tuple(row.split(" | ")[:2])] = row
    ordered = sorted(rows.values(), key=lambda each: [int(number) for number in re.findall(r"\d+", each)[:5]])
    return before + head + "".join(f"{each}\n" for each in ordered) + after[table.end() if table else 0 :]


def main() -> None:
    """Prepares, runs, and prints or writes the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="a version of torch, such as 2.15.0")
    parser.add_argument("--short", action="store_true", help="the smoke tests, and these: " + " ".join(SHORT))
    parser.add_argument("--environment", type=Path, metavar="DIR", help="make or take this one, and keep it")
    parser.add_argument("--prepare", action="store_true", help="make the environment, run nothing")
    parser.add_argument("--write", action="store_true", help=f"write the row into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="samestep-versions-") as temporary:
        environment = (args.environment or Path(temporary) / "env").resolve()
        if environment.is_relative_to(ROOT):
            sys.exit(f"--environment {environment} is in the checkout {ROOT}: name a folder outside of it")
        prepare(environment, args.torch)
        if args.prepare:
            return
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
        train(environment, variables)
        tests = [f"tests/{name}" for name in (*smoke(), *SHORT)] if args.short else []
        found = test(environment, variables, tests)
    python, today = ".".join(map(str, sys.version_info[:3])), datetime.date.today().isoformat()
    cells = ("short" if args.short else "quick", *found.values(), today)
    page = with_row(PAGE.read_text("utf-8"), python, args.torch, cells)
    if args.write:
        PAGE.write_text(page, "utf-8")
    print(f"Python {python}, torch {args.torch}, {cells[0]} tests:", *(f"{n} {name}" for name, n in found.items()))
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
