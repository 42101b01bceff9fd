"""What must hold for a program: its checks as text, and the scripts that are made of a program and checks."""

import contextlib
import gc
import io
import linecache
import multiprocessing.util
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import drawn_scripts
import forked_pool
import grammar
import psutil
import simulated_collectives
import simulated_machines
import simulated_membership
import simulated_processes
import simulated_ranks
from grammar import Program, programs
from hypothesis import strategies as st
from simulated_collectives import Call
from simulated_machines import MachineFault, MachinesSchedule
from simulated_membership import Fault, Schedule
from simulated_ranks import generator_states, set_generators

from samestep.errors import AuditError, SamestepError


@dataclass(frozen=True)
class Case:
    """A program, the number of ranks, the seed of their order, and what is checked."""

    program: Program
    checks: tuple[str, ...]
    ranks: int = 2
    order: int = 0
    place: int = 0  # of a fault
    count: int = 1
    numbers: dict = field(default_factory=dict)  # of a case over processes


def over_processes(program, check, strategies=("replicate",) * 2, ranks=(0, 0), place=0, faults=(), spares=0, more=()):
    """The case of a program by two strategies, or with faults: each a rank, a place and how it ends there."""
    first, second = ("replicate",) * 2 if check == "launchers" else strategies
    if {first, second} & grammar.OF_TIERS:
        second = first  # no other one has its bits
    program = program.but(options=(), files=False)  # which place ranks, or look at one of them
    program = program if check == "launchers" else saved(grammar.placed(program, first, second))
    given, total = [], []
    for name, number in zip((first, second), ranks, strict=True):
        total.append(1 + number % min(program.microbatches, 4))
        given.append(f"strategy={grammar.STRATEGIES[name]}")
    if spares and first == "replicate" and check != "launchers" and total[0] < 4:
        total[0], given[0] = total[0] + 1, f"{given[0]}, spares=1"
    if "worker" in more and not EXCUSES["workers"](program):
        given = [f"{each}, num_workers=1" for each in given]
    faults = {rank % total[0]: (rank % total[0], *rest) for rank, *rest in faults}.values()
    is_lost = all(how not in ("stop", "exception") for *_, how in faults)
    heals = first == "replicate" and not program.zero1 and is_lost and len(faults) < total[0]
    numbers = {
        "first": f"dict({given[0]})",
        "second": f"dict({given[1]})",
        "ranks_first": total[0],
        "ranks_second": total[1],
        "has_own_bits": first in grammar.OF_TIERS,
        "faults": [*faults],
        "heals": heals,
        "policy": {"replace": True, "max_restarts": len(faults)} if heals and "replaces" in more else {},
    }
    return Case(program, (check,), place=place, numbers=numbers)


EXCUSES = {  # of a check that says nothing about a program
    # A loader of one's own draws a seed for workers that begin, and they draw by it.
    "workers": lambda p: p.data in ("streams", "iterable", "own loader"),
    "resumed workers": lambda p: p.data in ("streams", "iterable", "own loader"),
    "resumed": lambda p: any("keep=2" in option for option in p.options),  # some are gone
    "plain": lambda p: not (p.is_plain and p.microbatches == 1),
    "nearly plain": lambda p: not (p.is_plain and p.microbatches > 1),
    "loops": lambda p: (
        p.loop == "own"
        or p.data in grammar.OF_LOADERS
        or bool(p.hooks or p.patience or p.steps or p.best)
        or any(option.startswith(("fit", "Trainer: state")) for option in p.options)
        or p.scheduler in grammar.BY_HOOK
    ),
}
ALSO = {  # checks of programs that are not drawn alone: of what others never or seldom see
    "plain": lambda p: True,
    "nearly plain": lambda p: True,
    "resumed": lambda p: p.precision == "16-mixed",
}
PROGRAM_CHECKS = [*["resumed"] * 3, *["ranks"] * 2, "watched", "seldom", "workers", "resumed workers", "loops"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64"]
INTEGERS = ("int8", "uint8", "int32", "int64", "bool")
FAULT_CHECKS = ["lost", "stopped", "full disk", "crash", "damaged"]
WAYS_TO_END = ["SIGKILL", "SIGKILL", "SIGKILL", "hang", "SIGSTOP", "stop", "exception"]


def cases(kind):
    """Draws cases of a kind, one of `run.KINDS`."""
    if kind == "scripts":
        return drawn_scripts.scripts()
    if kind == "membership":
        return schedules() | schedules_of_machines()
    if kind == "collectives":
        drawn, alone = st.lists(calls(), min_size=1, max_size=12), st.tuples(st.none(), st.just(0))
        odd = st.tuples(calls(), st.integers(0, 11))
        return st.tuples(drawn, st.integers(1, 8), alone | odd).filter(is_odd_or_all)
    if kind == "processes":
        ends = st.tuples(st.integers(0, 3), st.integers(0, 100_000), st.sampled_from(WAYS_TO_END))
        return st.builds(
            over_processes,
            programs().filter(lambda program: not program.named),  # whose one check is its line
            st.sampled_from(["strategies"] * 4 + ["struck"] * 6 + ["launchers"]),
            st.tuples(*[st.sampled_from([*grammar.STRATEGIES, *["replicate"] * 9])] * 2),
            st.tuples(*[st.integers(0, 3)] * 2),
            st.integers(0, 400),
            st.lists(ends, min_size=1, max_size=2),
            st.booleans(),
            st.sets(st.sampled_from(["worker", "replaces"])),
        )
    names = PROGRAM_CHECKS if kind == "programs" else FAULT_CHECKS
    checks = st.lists(st.sampled_from(names), min_size=1, max_size=3 if kind == "programs" else 1, unique=True)
    drawn = programs() if kind == "programs" else programs().map(saved)
    return st.builds(
        Case,
        drawn,
        checks.map(tuple),
        st.integers(2, 4),
        st.integers(0, 99),
        st.integers(0, 400),
        st.sampled_from([1, 2, 1000]),
    )


def calls():
    """Draws collectives, of which those that only move are such that gloo knows."""

    def made(name, dtype, op, **more):
        if dtype == "complex64" and "reduce" not in name and name != "broadcast":
            dtype = "float32"
        if dtype == "complex64":
            op = "AVG" if op == "AVG" else "SUM"
        elif dtype not in INTEGERS and op.startswith("B"):
            op = "MAX"
        elif dtype == "bool" and not op.startswith(("B", "M")):
            op = "BOR"
        return Call(name, dtype, op=op if "reduce" in name else "SUM", **more)

    return st.builds(
        made,
        st.sampled_from([*simulated_collectives.METHODS]),
        st.sampled_from(DTYPES),
        st.sampled_from(["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]),
        shape=st.lists(st.integers(0, 4), max_size=3).map(tuple) | st.just((70_001,)),
        root=st.integers(0, 7),
        strided=st.booleans(),
        waits=st.integers(0, 3),
        members=st.just(0) | st.integers(0, 255),
    )


def is_odd_or_all(case):
    """Whether the call of the last rank, if it makes another one, can be told from the others'."""
    drawn, ranks, (odd, at) = case
    if odd is None or ranks == 1 or at >= len(drawn):
        return odd is None
    names = [each.name.removesuffix("_single").removesuffix("_uneven") for each in (odd, drawn[at])]
    return names[0] != names[1]  # and not one operation in two forms


def schedules():
    """Draws runs of ranks to which something happens."""
    faults = st.builds(
        Fault, st.sampled_from(simulated_membership.KINDS), st.integers(0, 6), st.integers(0, 12), st.integers(0, 60)
    )
    return st.integers(1, 5).flatmap(
        lambda ranks: st.builds(
            Schedule,
            st.just(ranks),
            st.lists(faults, max_size=4).map(tuple),
            st.integers(0, 1 << 20),
            st.integers(1, 9),
            st.integers(ranks, 8),
            st.integers(0, ranks - 1),
            st.integers(0, 2),
            st.lists(st.integers(1, 8), max_size=2).map(tuple),
        )
    )


def schedules_of_machines():
    """Draws runs on several machines to which something happens."""
    faults = st.builds(
        Fault, st.sampled_from(simulated_membership.KINDS), st.integers(0, 6), st.integers(0, 12), st.integers(0, 60)
    )
    of_machines = st.builds(
        MachineFault,
        st.sampled_from(simulated_machines.MACHINE_FAULTS),
        st.integers(0, 15),
        st.integers(0, 80),
        st.sampled_from([2, 10, 25, 40, 80]),
    )
    return st.builds(
        MachinesSchedule,
        st.lists(st.integers(1, 3), min_size=2, max_size=4).map(tuple),
        st.lists(faults, max_size=2).map(tuple),
        st.lists(of_machines, max_size=3).map(tuple),
        st.integers(0, 1 << 20),
        st.integers(1, 9),
        st.integers(1, 8),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 2),
        st.sampled_from([1, 0, 10, 40]),
        st.lists(st.integers(1, 8), max_size=2).map(tuple),
    )


def saved(program):
    """The program by a trainer, which writes a run folder."""
    return grammar.allowed(program.but(loop="trainer"))


def script(case):
    """The text of a program and its checks, or of a resume if none of them applies, which runs by itself."""
    if isinstance(case, list):
        return drawn_scripts.script(case)
    if isinstance(case, Schedule):
        return f"{Path(simulated_membership.__file__).read_text()}\n\ncheck_schedule({case!r})\n"
    if isinstance(case, MachinesSchedule):
        heads = [Path(each.__file__).read_text() for each in (simulated_membership, simulated_machines)]
        heads[1] = "\n".join(
            line for line in heads[1].splitlines() if not line.startswith("from simulated_membership import")
        )
        return "\n\n".join([*heads, f"\ncheck_machines({case!r})\n"])
    if not isinstance(case, Case):
        drawn, ranks, (odd, at) = case
        listed = "".join(f"    {call!r},\n" for call in drawn)
        head = Path(simulated_collectives.__file__).read_text()
        return f"{head}\n\nCALLS = [\n{listed}]\n\ncheck_calls(CALLS, {ranks}, {odd!r}, {at})\n"
    program, processes = case.program, bool(case.numbers)
    also = [] if processes else [name for name, applies in ALSO.items() if applies(program)]
    if case.checks[0] in FAULT_CHECKS:  # which leave a run in the folder
        also = [name for name in also if "plain" in name]
    wanted = dict.fromkeys([*case.checks, *also])
    checks = [name for name in wanted if not EXCUSES.get(name, lambda p: False)(program)] or ["resumed"]
    checks = ["named"] if program.named else checks
    most = min(4, program.microbatches)
    numbers = {"ranks": min(case.ranks, most), "most": most, "others": case.order % most + 1, "order": case.order}
    numbers |= {"place": case.place, "count": case.count, "named": repr(grammar.NAMED.get(program.named))}
    numbers |= case.numbers
    heads = [simulated_ranks, forked_pool, simulated_processes] if processes else [simulated_ranks]
    texts = [Path(head.__file__).read_text().split('"""\n\n', 1)[1].replace(FROM_HEADS, "") for head in heads]
    texts.append(grammar.text(program, processes=processes))
    if "loops" in checks:
        by_hand = grammar.text(program.but(loop="own", evaluated=""), "train_by_hand")
        texts.append(next(part for part in by_hand.split("\n\n\n") if part.startswith("def train_by_hand")))
    functions = {"plain": "plain", "nearly plain": "plain", "loops": "train_by_hand"}
    calls = [f"check_{name.replace(' ', '_')}({functions.get(name, 'train')}, one, folder, n)" for name in checks]
    texts.append(
        f"def check(folder, one):\n    n = SimpleNamespace({', '.join(f'{k}={v}' for k, v in numbers.items())})\n"
        + "".join(f"    {call}\n" for call in calls)
    )
    texts.append(
        'if __name__ == "__main__":\n'
        f"{'    train_by_command()' if processes else ''}\n    with tempfile.TemporaryDirectory() as folder:\n"
        "        check(Path(folder), in_turns(1, train)[0])\n"
        '    print("all checks hold")\n'
    )
    texts[0] = f'"""{program}: {", ".join(checks)}."""\n{IMPORTS}{texts[0]}'
    return grammar.used("\n\n\n".join(texts), {"check", "in_turns"})


IMPORTS = "import tempfile\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
FROM_HEADS = "from forked_pool import forked_pool\nfrom simulated_ranks import check_same, checkpoints_in\n"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where syncing files takes no time


class Refused(Exception):
    """The program is refused on one rank already, by a sentence of samestep; any other error is a failure."""


def held(temporary):
    """What this process holds: threads, children, descriptors, mapped shared memory, and files in a folder."""
    children = [str(child.pid) for child in psutil.Process().children()]
    maps = Path("/proc/self/maps").read_text()
    links = {link: os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)}
    return {
        *(f"thread {thread.name} {thread.native_id}" for thread in threading.enumerate()),
        *(f"process {child}" for child in children),
        # matplotlib keeps open the fonts of the last threads that drew
        *(f"descriptor {link.name}: {place}" for link, place in links.items() if not place.endswith(".ttf")),
        *(f"memory {line}" for line in maps.splitlines() if "/dev/shm/" in line or "/memfd:" in line),
        *(f"file {place}" for place in (*temporary.rglob("*"), *Path("/dev/shm").glob(f"*{os.getpid()}*"))),
    }


def run_script(text):
    """Runs the checks of a script here; raises what they raise, and `Refused` if one undisturbed rank refuses.

    Raises also if something is left behind, again when it runs again: what a process makes once is made by then.
    """
    if "check_schedule(" in text:  # ranks that are killed are threads there, for which no kernel frees anything
        return _run_script(text)
    multiprocessing.util.get_temp_dir()  # of the whole process
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        for _ in range(2):
            with patch.object(tempfile, "tempdir", folder):
                before = held(Path(folder))
                _run_script(text)
                for _ in range(5):  # a thread that has said its last word may still be ending
                    if not (left := held(Path(folder)) - before):
                        return None
                    gc.collect()
                    time.sleep(0.05)
    raise AssertionError(f"left behind: {sorted(left)}")


def _run_script(text):
    module = ModuleType("simulated")
    name = f"<simulated {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    sys.modules["simulated"] = module  # classes are looked up there
    said = io.StringIO()
    states = generator_states()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="simulated-", dir=MEMORY) as folder,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            module.__file__ = f"{folder}/simulated.py"
            Path(module.__file__).write_text(text)
            exec(compile(text, name, "exec"), vars(module))
            if hasattr(module, "check"):
                try:
                    one = module.in_turns(1, module.train)[0]
                except AuditError:
                    raise  # no sentence about the program: a right device is called wrong
                except SamestepError as error:
                    raise Refused(f"{type(error).__name__}: {error}") from error
                module.check(Path(folder), one)
    finally:
        set_generators(states)
        del linecache.cache[name], sys.modules["simulated"]
