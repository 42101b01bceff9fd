"""The golden file: digests of a matrix of runs, by which a change of the code shows that it moves no bit.

    python tests/golden/golden.py                        compare a run of the matrix with golden.json
    python tests/golden/golden.py --write                write golden.json
    python tests/golden/golden.py --against COMMIT       compare with a run of that commit, on a CPU of any kind
    python tests/golden/golden.py --only 'recipe gpt*'   a part of it

Kernels are portable (`--portable` of samestep), so the digests hold on each x86-64 CPU with AVX2. They are this CPU's
own with --against, with SAMESTEP_PORTABLE=0, and where kernels cannot be portable.

Exit code 0: all equal; 1: something differs, is missing or failed; 2: there is nothing to compare with. A commit is run
by its own file of this name with `--results FILE`, so code and names may change between the two: only results, from the
names of entries to digests, are compared.
"""

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILE = HERE / "golden.json"
THREADS = 1
SEED = 3
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "sve", "asimd")
CHUNK = 24  # cases of ranks that take turns, in one piece of work


def kind(portable=None):
    """The kind of machine for which digests hold, with portable kernels or, as now, with or without them."""
    import torch

    from samestep.devices.portable import asks_for_portable

    if asks_for_portable() if portable is None else portable:
        return {"kernels": "portable", "torch": torch.__version__.partition("+")[0], "threads": THREADS}
    about = Path("/proc/cpuinfo")
    text = about.read_text() if about.exists() else ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "family": f"{fields.get('cpu family', '')}.{fields.get('model', '')}",
        "flags": " ".join(flag for flag in FLAGS if flag in flags),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": THREADS,
    }


def pieces_of(names, cases):
    """The cases by world, as pieces of work; those that take longest first."""
    by_world = defaultdict(list)
    for name in names:
        for world in cases[name].worlds:
            by_world[world].append(name)
    pieces = []
    for world, found in by_world.items():
        size = 1 if world == "here" else CHUNK if world.isdigit() else len(found)
        pieces += [(world, found[first : first + size]) for first in range(0, len(found), size)]
    return sorted(pieces, key=lambda piece: (piece[0].isdigit(), piece[0] == "here", -len(piece[1])))


def run_piece(world, names, seed):
    """Runs some cases in one world: names to digests by label. What fails has its error in the place of digests."""
    import torch
    from golden_cases import CASES, digest, on_ranks
    from golden_worlds import open_world

    torch.set_num_threads(THREADS)
    found = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as folder, open_world(world) as ranks:
        for number, name in enumerate(names):
            case, own = CASES[name], Path(folder) / str(number)
            try:
                if world in ("here", "verify"):
                    own.mkdir()
                    with redirect_stdout(io.StringIO()):
                        contents = case.program(ranks, seed, own, *case.arguments)
                    found[name] = {label: digest(content) for label, content in contents.items()}
                else:
                    digests = enumerate(ranks.run(on_ranks, seed, own, name))
                    found[name] = {f"{world}, rank {rank}": each for rank, each in digests if each is not None}
            except (Exception, SystemExit) as error:
                lines = [line for line in traceback.format_exc().splitlines() if line.strip()]
                found[name] = {world: f"failed: {type(error).__name__}: {lines[-1][:300]}"}
    return found


def run_matrix(names, seed, jobs):
    """Runs cases, in so many processes, or in this one if none; a digest each, or a sentence on what went wrong."""
    from golden_cases import CASES

    found, pieces = defaultdict(dict), pieces_of(names, CASES)
    if not jobs:
        for piece in pieces:
            for name, labels in run_piece(*piece, seed).items():
                found[name] |= labels
        return {name: settled(name, found, CASES) for name in sorted(found)}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as executor:
        pending = {executor.submit(run_piece, *piece, seed): piece for piece in pieces}
        for count, done in enumerate(as_completed(pending), 1):
            world, part = pending[done]
            error = done.exception()
            results = done.result() if error is None else {name: {world: f"failed: {error}"} for name in part}
            for name, labels in results.items():
                found[name] |= labels
            print(f"{count}/{len(pieces)}: {len(part)} in the world {world!r}", file=sys.stderr, flush=True)
    return {name: settled(name, found, CASES) for name in sorted(found)}


def settled(name, found, cases):
    """The digest on which all worlds of a case agree, and all cases of its group; or who says what."""
    failed = [f"{label} {digest}" for label, digest in found[name].items() if digest.startswith("failed")]
    group, said = cases[name].group, defaultdict(list)
    for other in [name, *(other for other in found if group and cases[other].group == group)]:
        for label, digest in found[other].items():
            said[digest].append(f"{other}: {label}")
    if failed or not said:
        return "; ".join(failed) or "failed: no rank returned anything"
    said = {digest: names for digest, names in said.items() if not digest.startswith("failed")}
    parts = [f"{digest} by {names[0]} and {len(names) - 1} more" for digest, names in said.items()]
    return f"disagree: {'; '.join(parts)}" if len(parts) > 1 else next(iter(said))


def is_settled(value):
    """Whether a value is a digest or a verdict, not a failure."""
    return not value.startswith(("failed", "disagree"))


def compare(before, after):
    """Prints how many entries of each kind are equal, different, missing and new, and which; the exit code."""
    counts, lines = defaultdict(Counter), []
    for name in sorted(before.keys() | after.keys()):
        one, other = before.get(name), after.get(name)
        failed = other is not None and not is_settled(other)
        outcome = "failed" if failed else "missing" if other is None else "new" if one is None else "different"
        outcome = "equal" if one == other and not failed else outcome
        counts[name.split()[0]][outcome] += 1
        if outcome != "equal":
            lines.append(f"{outcome:9}  {name}: {one} -> {other}")
    print("\n".join(lines) + ("\n" if lines else ""), end="")
    outcomes = ("equal", "different", "failed", "missing", "new")
    print(" ".join(f"{word:>10}" for word in ("", *outcomes)))
    for kind_of_entry, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        print(" ".join(f"{word:>10}" for word in (kind_of_entry, *(count[outcome] for outcome in outcomes))))
    bad = sum(count[outcome] for count in counts.values() for outcome in ("different", "failed", "missing"))
    return 1 if bad or not counts else 0


def results_of(commit, patterns, jobs):
    """What a commit gives, run by its own golden files in a work tree of its own; None where there is none."""
    asked = ["--jobs", str(jobs), *(word for pattern in patterns for word in ("--only", pattern))]
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        tree, results = Path(folder) / "tree", Path(folder) / "results"
        script = tree / HERE.relative_to(ROOT) / Path(__file__).name
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=False)
        try:
            if not script.exists():
                print(f"there is no {script.relative_to(tree)} in {commit}; needed: a commit that has it")
                return None
            subprocess.run([sys.executable, str(script), "--results", str(results), *asked], check=True)
            return json.loads(results.read_text())
        finally:
            if tree.exists():
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def write(path, results):
    """Writes the golden file: the kind of machine, and a line an entry."""
    text = json.dumps({"kind": kind(), "digests": dict(sorted(results.items()))}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def main(words=None):
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the golden file")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, not with the golden file")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write results to this file, compare nothing")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="entries of such names")
    parser.add_argument("--jobs", type=int, default=2, help="processes; 0: in this one")
    parser.add_argument("--seed", type=int, default=SEED, help="another one must be noticed")
    parser.add_argument("--file", type=Path, default=FILE, help="the golden file")
    asked = parser.parse_args(words)

    def chosen(names):
        return [name for name in names if not asked.only or any(fnmatch(name, pattern) for pattern in asked.only)]

    recorded = None
    if not (asked.write or asked.against or asked.results):
        recorded = json.loads(asked.file.read_text())
        if recorded["kind"] != kind():
            print(f"{asked.file.name} holds for {recorded['kind']}; this is {kind()}: use --against COMMIT")
            return 2
    if asked.write and asked.only:
        print("--write writes the whole file; leave --only out")
        return 2
    from golden_cases import CASES

    before = None
    if asked.against:
        before = results_of(asked.against, asked.only, asked.jobs)
        if before is None:
            return 2
    results = run_matrix(chosen(CASES), asked.seed, asked.jobs)
    if asked.results:
        asked.results.write_text(json.dumps(results))
        return 0
    if asked.write:
        bad = [f"{name}: {value}" for name, value in results.items() if not is_settled(value)]
        print("\n".join(bad) or f"{len(results)} entries")
        if not bad:
            write(asked.file, results)
        return 1 if bad else 0
    if before is None:
        before = {name: recorded["digests"][name] for name in chosen(recorded["digests"])}
    return compare(before, results)


def variables(words):
    """The variables of portable kernels, or one that says that they are this CPU's own."""
    from samestep.devices.portable import PORTABLE_VARIABLE, chosen_portable, portable_variables

    is_native = any(word.startswith("--against") for word in words) or not chosen_portable("cpu", None, default=True)
    return {PORTABLE_VARIABLE: "0"} if is_native else portable_variables("cpu", True)


if __name__ == "__main__":
    os.environ |= variables(sys.argv[1:])
    os.environ |= {"OMP_NUM_THREADS": str(THREADS), "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    sys.exit(main())
