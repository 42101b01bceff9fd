"""Counts lines of Python by kind and folder, and what grows unseen; `make check` holds the latter to its limits.

python tools/count_lines.py                     src and tests, a row for each folder
python tools/count_lines.py --against main      the same, before and after
python tools/count_lines.py --imports           samestep's own modules that a recipe loads before its first step
python tools/count_lines.py --limits            fails for a count above its limit in tools/limits.json
python tools/count_lines.py --lower             lowers the limits to today's counts

A limit is raised by hand, in a change that lowers another one and says which.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tools" / "limits.json"
KINDS = ("code", "docstrings", "comments", "blank")
BESIDE = "beside code"  # comments at the end of a line of code, which are no lines of their own
HEART = "core, comm, engine*"  # * without the strategies
STRATEGIES = ("sharded_model.py", "sharded_state.py", "sharded_strategy.py", "zero1.py")
FIRST_STEP = """
import os, runpy, sys, torch
def stop(module, args):
    names = sorted(name for name in sys.modules if name.partition(".")[0] == "samestep")
    print(*names, sep="\\n", file=sys.__stdout__, flush=True)
    os._exit(0)
torch.nn.modules.module.register_module_forward_pre_hook(stop)
sys.argv = ["mlp", "--data", "table.csv", "--epochs", "1"]
runpy.run_module("samestep.recipes.mlp", run_name="__main__")
"""


def count(source: str) -> Counter[str]:
    """The lines of a source by kind; a line with code and a comment is code."""
    lines = source.splitlines()
    kinds, beside = ["blank" if not line.strip() else "code" for line in lines], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            kinds[token.start[0] - 1] = "comments"
        elif token.type == tokenize.COMMENT:
            beside += 1
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kinds[node.lineno - 1 : node.end_lineno] = ["docstrings"] * (node.end_lineno - node.lineno + 1)
    return Counter({**Counter(kinds), BESIDE: beside})


def by_folder(files: Iterable[tuple[str, str]]) -> dict[str, Counter[str]]:
    """The counts of files, (path, source), by the folder below src/samestep or tests; a file there is its own row."""
    counts: dict[str, Counter[str]] = {}
    for path, source in files:
        depth = 3 if path.startswith("src/") else 2
        parts = path.split("/")
        row = "/".join(parts[:depth])
        own = "/".join(parts[2:])
        is_heart = parts[0] == "src" and own.startswith(("core/", "comm/", "engine/"))
        is_heart = is_heart and not own.removeprefix("engine/").startswith(STRATEGIES)
        for name in (row, f"{parts[0]} in all", *[HEART] * is_heart):
            counts.setdefault(name, Counter()).update(count(source))
    return counts


def here() -> list[tuple[str, str]]:
    """The Python files of the checkout."""
    paths = [path for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]


def at(commit: str) -> list[tuple[str, str]]:
    """The Python files of a commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    paths = git("ls-tree", "-r", "--name-only", commit, "src", "tests").splitlines()
    return [(path, git("show", f"{commit}:{path}")) for path in paths if path.endswith(".py")]


def private_names_of_others(sources: Iterable[str]) -> set[str]:
    """Attributes with a leading underscore that are read here and made nowhere, and modules that are imported so."""
    used, own = set(), {"_asdict", "_fields", "_replace"}  # public ones of named tuples
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                used.add(name)
            case ast.ImportFrom(module=module, names=names) if module and not module.startswith("samestep"):
                used.update(module.split("."), (each.name for each in names))
            case ast.Attribute(attr=name) | ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                own.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
    return {name for name in used - own if name.startswith("_") and not name.startswith("__")}


def places_that_patch(source: str) -> int:
    """Calls that describe a patch; one in a comprehension counts once."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sum(isinstance(call.func, ast.Name) and call.func.id in ("Patch", "Wrap") for call in calls)


def what_grows() -> dict[str, int]:
    """The counts that have a limit."""
    folders, pages = by_folder(here()), sorted((ROOT / "docs").rglob("*.md"))
    sources = [source for path, source in here() if path.startswith("src/")]
    interface = (ROOT / "tests" / "interface.txt").read_text(encoding="utf-8").splitlines()
    exported = [line for line in interface if re.match(r"\w+($|\()", line)]

    def parameters(function: str) -> set[str]:
        inside = next(line for line in interface if line.startswith(f"{function}(")).partition("(")[2].rstrip(")")
        return {word.rstrip("=") for word in inside.split(", ")} - {"*"}

    return {
        "lines of src": sum(folders["src in all"][kind] for kind in KINDS),
        "lines of code of src": folders["src in all"]["code"],
        "lines of tests": sum(folders["tests in all"][kind] for kind in KINDS),
        "lines of docs": sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages),
        "pages of docs": len(pages),
        "options and arguments of commands": sum(line.startswith("$ ") for line in interface),
        "exported names": len(exported),
        "places that patch others' functions": sum(map(places_that_patch, sources)),
        "private names of others": len(private_names_of_others(sources)),
        "parameters of Run.train_step": len(parameters("Run.train_step")),
        "parameters of Trainer": len(parameters("Trainer")),
    }


def hold_to_limits(lower: bool) -> None:
    """Prints each count beside its limit; ends with an error if one is above, or lowers the limits."""
    counts, limits = what_grows(), json.loads(LIMITS.read_text(encoding="utf-8"))
    width = max(map(len, counts))
    for name, number in counts.items():
        print(f"{name:{width}}{number:>8,}{limits[name]:>8,}" + "  above its limit" * (number > limits[name]))
    if lower:
        lowered = {name: min(number, limits[name]) for name, number in counts.items()}
        LIMITS.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
    if above := [name for name, number in counts.items() if number > limits[name]]:
        raise SystemExit(
            f"{', '.join(above)}: take something out, or raise the limit in {LIMITS.relative_to(ROOT)} and say why"
        )


def modules_before_the_first_step() -> list[str]:
    """samestep's own modules that one worker of a recipe has loaded when its model first runs."""
    with tempfile.TemporaryDirectory() as folder:
        rows = "".join(f"{i % 7},{i % 11},{3 * i % 5}\n" for i in range(64))
        (Path(folder) / "table.csv").write_text("a,b,target\n" + rows)
        worker = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment = {**os.environ, **worker, "MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}
        command = [sys.executable, "-c", FIRST_STEP]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    names = [line for line in done.stdout.splitlines() if line.partition(".")[0] == "samestep"]
    if not names:
        raise SystemExit(done.stderr)
    return names


def show(after: dict[str, Counter[str]], before: dict[str, Counter[str]] | None) -> None:
    """Prints a row for each folder."""
    names = sorted({*after, *(before or {})})
    width = max(map(len, names))
    heads = "".join(f"{kind:>12}" for kind in (*KINDS, "lines", BESIDE))
    print(f"{'':{width}}{heads}" + (f"{'before':>12}{'change':>12}" if before is not None else ""))
    for name in names:
        counts = after.get(name, Counter())
        total = sum(counts[kind] for kind in KINDS)
        row = "".join(f"{number:>12,}" for number in (*(counts[kind] for kind in KINDS), total, counts[BESIDE]))
        if before is not None:
            old = sum(before.get(name, Counter())[kind] for kind in KINDS)
            row += f"{old:>12,}{total - old:>+12,}"
        print(f"{name:{width}}{row}")


def main() -> None:
    """Reads the options and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="print the lines of that commit too, and the change")
    parser.add_argument("--imports", action="store_true", help="list and count modules loaded before the first step")
    parser.add_argument("--limits", action="store_true", help="fail if something is above its limit")
    parser.add_argument("--lower", action="store_true", help="lower the limits to what is there")
    options = parser.parse_args()
    if options.limits or options.lower:
        hold_to_limits(options.lower)
        return
    if options.imports:
        names = modules_before_the_first_step()
        print(*names, sep="\n")
        print(f"{len(names)} modules")
        return
    show(by_folder(here()), by_folder(at(options.against)) if options.against else None)


if __name__ == "__main__":
    main()
