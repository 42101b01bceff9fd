"""What must hold for a program: its checks as text, and the scripts that are made of a program and checks."""

import contextlib
import gc
import io
import linecache
import math
import multiprocessing.util
import os
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import drawn_scripts
import grammar
import psutil
import simulated_collectives
import simulated_membership
import simulated_processes
from grammar import HEAD, Program, programs
from hypothesis import strategies as st
from simulated_collectives import Call
from simulated_membership import Fault, Schedule
from simulated_ranks import generator_states, set_generators

from samestep.errors import SamestepError


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
    program = grammar.replace(program, options=(), named="", files=False)  # which place ranks, or look at one of them
    program = program if check == "launchers" else saved(grammar.placed(program, first, second))
    given, total = [], []
    for name, number in zip((first, second), ranks, strict=True):
        strategy, mesh = grammar.STRATEGIES[name]
        inner = math.prod(mesh.values())
        total.append(inner * (1 + number % min(program.microbatches, max(1, 4 // inner))))
        given.append(f"strategy={strategy}" + (f", mesh={ {'data': -1, **mesh} }" if mesh else ""))
    if spares and first == "replicate" and check != "launchers" and total[0] < 4:
        total[0], given[0] = total[0] + 1, f"{given[0]}, spares=1"
    if "worker" in more and not EXCUSES["workers"](program):
        given = [f"{each}, num_workers=1" for each in given]
    faults = {rank % total[0]: (rank % total[0], *rest) for rank, *rest in faults}.values()
    is_lost = all(how not in ("stop", "exception") for *_, how in faults)
    heals = first in ("replicate", "zero1") and is_lost and len(faults) < total[0]
    numbers = {
        "first": given[0],
        "second": given[1],
        "ranks_first": total[0],
        "ranks_second": total[1],
        "reference": f"in_processes({inner}, train, {given[0]})[0][0]" if first in grammar.OF_TIERS else "one",
        "faults": [*faults],
        "heals": heals,
        "policy": {"replace": True, "max_restarts": len(faults)} if heals and "replaces" in more else {},
    }
    return Case(program, (check,), place=place, numbers=numbers)


TEXTS = {
    "ranks": """
        for found in in_turns({ranks}, train, order={order}):
            check_same(found, one)
    """,
    "resumed": """
        for found in in_turns({ranks}, train, folder / "run", order={order}):
            check_same(found, one)
        places = sorted((folder / "run" / "checkpoints").glob("step-*"))
        assert places
        stride = -(-len(places) // 5)
        for place in {{*places[{place} % stride :: stride], places[-1]}}:
            done = int(place.name[5:])
            others = (done + {ranks}) % {most} + 1
            for found in in_turns(others, train, None, place, order={order}):
                check_same(found, one, done, ("draws", "drawn") if place == places[-1] else ())
    """,
    "seldom": """
        check_same(in_turns(1, train, folder / "seldom", every=3)[0], one)
    """,
    "watched": """
        check_same(in_turns({ranks}, train, looks=True)[0], one)
    """,
    "workers": """
        check_same(in_turns(1, train, num_workers=2)[0], one)
    """,
    "resumed workers": """
        whole = in_turns(1, train, folder / "workers", num_workers=1)[0]
        places = sorted((folder / "workers" / "checkpoints").glob("step-*"))[:-1]
        for place in places[{place} % max(1, len(places)) :][:1]:
            check_same(in_turns(1, train, None, place, num_workers=2)[0], whole, int(place.name[5:]))
    """,
    "plain": """
        check_same(plain(), {{name: one[name] for name in ("digest", "weights")}})
    """,
    "nearly plain": """
        for a, b in zip(one["weights"], plain()["weights"], strict=True):
            assert abs(a - b) <= 1e-4 * (1 + abs(b)), (a, b)  # another order of the sums: float32, some steps
    """,
    "loops": """
        check_same(in_turns(1, train_by_hand)[0], one, but=("history", "best", "drawn", "averaged"))
    """,
    "lost": """
        world = Turns({ranks})
        world.run(lambda t: train(Communicator(torch.device("cpu"), t, t, "ordered"), folder / "whole"))
        lost = {order} % {ranks}, {place} % world.exchanges
        assert in_turns({ranks}, train, folder / "run", lost=lost) == "lost"
        place = folder / "run" if any((folder / "run" / "checkpoints").glob("step-*")) else None
        for found in in_turns({others}, train, None, place):
            check_same(found, one, 1 << 30, ("draws", "drawn"))
    """,
    "stopped": """
        first = {place} % len(one["losses"])
        in_turns({ranks}, train, folder / "run", stops=({order} % {ranks}, first))
        in_turns({others}, train, folder / "run", resume="auto", stops=(0, first + {count}))
        for found in in_turns({ranks}, train, folder / "run", resume="auto"):
            check_same(found, one, 1 << 30, ("draws", "drawn"))
    """,
    "named": """
        with redirect_stderr(io.StringIO()) as said:
            in_turns(1, train, folder / "named")
        assert {named!r} in said.getvalue(), said.getvalue()
    """,
    "full disk": """
        with failing(folder / "run", 1 << 30, 0, "full") as disk:
            in_turns(1, train, folder / "run")
        shutil.rmtree(folder / "run")
        try:
            with failing(folder / "run", 1 + {place} % disk.seen, {count}, "full"):
                found = in_turns({ranks}, train, folder / "run")
        except RunFolderError:
            found = None
        if found is None:
            found = in_turns({others}, train, folder / "run", resume="auto")
        for each in found:
            check_same(each, one, 1 << 30, ("draws", "drawn"))
    """,
    "crash": """
        with failing(folder / "run", 1 << 30, 0, "full") as disk:
            in_turns(1, train, folder / "run")
        shutil.rmtree(folder / "run")
        with failing(folder / "run", 1 + {place} % disk.seen, 1, "crash"), suppress(BaseException):
            in_turns(1, train, folder / "run")
        if (folder / "run").exists():
            shutil.copytree(folder / "run", folder / "left")  # without the lock, which ends with a process
        for found in in_turns({others}, train, folder / "left", resume="auto"):
            check_same(found, one, 1 << 30, ("draws", "drawn"))
    """,
    "damaged": """
        in_turns({ranks}, train, folder / "run")
        places = sorted((folder / "run" / "checkpoints").glob("step-*"))
        file = sorted(places[-1].iterdir())[{place} % len([*places[-1].iterdir()])]
        data = bytearray(file.read_bytes())
        data[{order} * len(data) // 100] ^= 1
        file.write_bytes(data)
        if len(places) > 1:
            for found in in_turns({others}, train, None, folder / "run"):
                check_same(found, one, 1 << 30, ("draws", "drawn"))
    """,
    "strategies": """
        one = {reference}
        for found in in_processes({ranks_first}, train, folder / "run", {first})[0]:
            check_same(found, one, but=("weights",))
        places = sorted((folder / "run" / "checkpoints").glob("step-*"))
        place = places[{place} % len(places)]
        done, but = int(place.name[5:]), ("weights", "draws", "drawn") if place == places[-1] else ("weights",)
        for found in in_processes({ranks_second}, train, None, place, {second})[0]:
            check_same(found, one, done, but)
    """,
    "struck": """
        one = {reference}
        whole, calls, _ = in_processes({ranks_first}, train, folder / "whole", {first})
        for found in whole:
            check_same(found, one, but=("weights",))
        faults = [drawn_fault(calls, *each) for each in {faults}]
        found, _, outcome = in_processes(
            {ranks_first}, train, folder / "run", {first}, faults=faults, policy={policy}
        )
        if outcome.exit_code:
            assert not {heals}, outcome.failure
            found = in_processes({ranks_second}, train, folder / "run", resume="auto", {second})[0]
        assert found
        for each in found:
            check_same(each, one, 1 << 30, ("weights", "draws", "drawn"))
        check_same(ledger(folder / "run"), ledger(folder / "whole"))
    """,
    "launchers": """
        ways = "run --devices cpu:{ranks_first}", "torch.distributed.run --nproc-per-node {ranks_first}"
        for options in [f"-m samestep {{ways[0]}}", f"-m {{ways[1]}}", ""]:
            for found in by_command(__file__, options.split(), folder):
                check_same(found, one)
        check_same(samestep.launch(train, devices="cpu:{ranks_first}"), one)
    """,
}
EXCUSES = {  # of a check that says nothing about a program
    # A loader of one's own draws a seed for workers that begin, and they draw by it.
    "workers": lambda p: p.data in ("streams", "iterable", "own loader", "own persistent"),
    "resumed workers": lambda p: p.data in ("streams", "iterable", "own loader"),
    "resumed": lambda p: any("keep=2" in option for option in p.options),  # some are gone
    "stopped": lambda p: p.calls,  # of which the next one goes on
    "plain": lambda p: not (p.plain and p.microbatches == 1),
    "nearly plain": lambda p: not (p.plain and p.microbatches > 1),
    "loops": lambda p: (
        p.loop == "own"
        or p.data in grammar.OF_LOADERS
        or bool(p.hooks or p.calls or p.patience or p.steps or p.best)
        or any(option.startswith(("fit", "Trainer: state")) for option in p.options)
        or p.scheduler in ("epochs", "plateau")
    ),
}
PLAIN_CHECKS = ["plain", "nearly plain"]  # wherever they apply
PROGRAM_CHECKS = [*["resumed"] * 3, *["ranks"] * 2, "watched", "seldom", "workers", "resumed workers", "loops"]
NAMES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"]
NAMES += [
    "reduce_scatter",
    "reduce_scatter_single",
    "all_gather_single",
    "all_reduce_coalesced",
    "all_gather_coalesced",
]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64"]
INTEGERS = ("int8", "uint8", "int32", "int64", "bool")
FAULT_CHECKS = ["lost", "stopped", "full disk", "crash", "damaged"]
WAYS_TO_END = ["SIGKILL", "SIGKILL", "SIGKILL", "hang", "SIGSTOP", "stop", "exception"]


def cases(kind):
    """Draws cases of a kind, one of `run.KINDS`."""
    if kind == "scripts":
        return drawn_scripts.scripts()
    if kind == "membership":
        return schedules()
    if kind == "collectives":
        drawn, alone = st.lists(calls(), min_size=1, max_size=12), st.tuples(st.none(), st.just(0))
        odd = st.tuples(calls(), st.integers(0, 11))
        return st.tuples(drawn, st.integers(1, 8), alone | odd).filter(is_odd_or_all)
    if kind == "processes":
        ends = st.tuples(st.integers(0, 3), st.integers(0, 100_000), st.sampled_from(WAYS_TO_END))
        return st.builds(
            over_processes,
            programs(),
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
    """Draws collectives that gloo knows."""

    def made(name, dtype, op, **more):
        if ("reduce" in name and dtype == "bfloat16") or (
            dtype == "complex64" and name not in ("all_reduce", "broadcast")
        ):
            dtype = "float32"
        if dtype == "complex64":
            op = "SUM"
        elif dtype not in INTEGERS and op.startswith("B"):
            op = "MAX"
        elif dtype == "bool" and not op.startswith(("B", "M")):
            op = "BOR"
        return Call(name, dtype, op=op if "reduce" in name else "SUM", **more)

    return st.builds(
        made,
        st.sampled_from(NAMES),
        st.sampled_from(DTYPES),
        st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]),
        shape=st.lists(st.integers(0, 4), max_size=3).map(tuple) | st.just((70_001,)),
        root=st.integers(0, 7),
        strided=st.booleans(),
        waits=st.integers(0, 3),
        members=st.just(0) | st.integers(0, 255),
    )


def is_odd_or_all(case):
    """Whether the call of the last rank, if it makes another one, can be told from the others'."""
    drawn, ranks, (odd, at) = case
    return odd is None or (ranks > 1 and at < len(drawn) and odd.name != drawn[at].name)


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


def saved(program):
    """The program by a trainer, which writes a run folder."""
    return grammar.allowed(grammar.replace(program, loop="trainer"))


def script(case):
    """The text of a program and its checks, or of a resume if none of them applies, which runs by itself."""
    if isinstance(case, list):
        return drawn_scripts.script(case)
    if isinstance(case, Schedule):
        return f"{Path(simulated_membership.__file__).read_text()}\n\ncheck_schedule({case!r})\n"
    if not isinstance(case, Case):
        drawn, ranks, (odd, at) = case
        listed = "".join(f"    {call!r},\n" for call in drawn)
        head = Path(simulated_collectives.__file__).read_text()
        return f"{head}\n\nCALLS = [\n{listed}]\n\ncheck_calls(CALLS, {ranks}, {odd!r}, {at})\n"
    program = case.program
    wanted = case.checks if case.numbers else dict.fromkeys([*case.checks, *PLAIN_CHECKS])
    checks = [name for name in wanted if not EXCUSES.get(name, lambda p: False)(program)] or ["resumed"]
    checks = ["named"] if program.named else checks
    most = min(4, program.microbatches)
    numbers = {
        "ranks": min(case.ranks, most),
        "most": most,
        "others": case.order % most + 1,
        "order": case.order,
        "place": case.place,
        "count": case.count,
        "named": grammar.NAMED.get(program.named),
        **case.numbers,
    }
    head = HEAD.read_text().split('"""\n', 1)[1]
    head = head.replace("import sys\n", "import io\nimport shutil\nimport sys\nimport tempfile\n")
    more = "contextlib import contextmanager, redirect_stderr, suppress\nfrom pathlib import Path"
    head = head.replace("contextlib import contextmanager", more)
    head = head.replace("import PeerLostError", "import PeerLostError, RunFolderError")
    body = grammar.text(program)
    if "loops" in checks:
        by_hand = grammar.text(grammar.replace(program, loop="own", evaluated=False))
        body += "\n\ndef train_by_hand(" + by_hand.split("def train(", 1)[1].split("\n\n\n")[0]
    by_command = ""
    if case.numbers:
        made = "    optimizer = make_optimizer(model)\n"
        body = body.replace(made, f"    strategy = divided(run, model, strategy)\n{made}")
        body = Path(simulated_processes.__file__).read_text() + "\n\n" + body
        by_command = "    train_by_command()\n"
    text = "".join(textwrap.dedent(TEXTS[name]).format(**numbers) for name in checks)
    return (
        f'"""{program}: {", ".join(checks)}."""\n{head}\n\n{body}\n\n'
        f"def check(folder, one):\n{textwrap.indent(text, '    ')}\n\n"
        'if __name__ == "__main__":\n'
        f"{by_command}    with tempfile.TemporaryDirectory() as folder:\n"
        "        check(Path(folder), in_turns(1, train)[0])\n"
        '    print("all checks hold")\n'
    )


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
                except SamestepError as error:
                    raise Refused(f"{type(error).__name__}: {error}") from error
                module.check(Path(folder), one)
    finally:
        set_generators(states)
        del linecache.cache[name], sys.modules["simulated"]
