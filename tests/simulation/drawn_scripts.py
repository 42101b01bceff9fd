"""The grammar of other people's scripts: from choices to the text of one, and how it is run and compared."""

import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import forked_pool
import grammar
import simulated_scripts
from hypothesis import strategies as st

FROM_POOL = "from forked_pool import forked_pool\n"
TEMPLATE = Path(__file__).with_name("drawn_script.txt")
RARE = [False, False, False, True]
CHOICES = {  # the first value of each is the simplest
    "kind": [*["ddp", "ddp", "plain", "parallel"] * 2, "fsdp", *(["accelerate"] if find_spec("accelerate") else [])],
    "ranks": [2, 3],
    "sampler": ["every other", "shuffled", "random", "replaced", "distributed", "drop last", "in order", "batches"],
    "samples": [*range(6, 17)],
    "batch": [2, 3, 4],
    "epochs": [1, 2, 3],
    "accumulate": [1, 2],
    "optimizer": ["SGD", "SGD, momentum=0.9", "Adam", "AdamW, amsgrad=True", "RMSprop", "Adagrad"],
    "scheduler": ["", "StepLR(optimizer, 2, gamma=0.5)", "CosineAnnealingLR(optimizer, 4)",
                  "OneCycleLR(optimizer, max_lr=0.1, total_steps=200, cycle_momentum=False)"],
    "seeds": ["rank", "rank", "same", "none"],
    "option": ["", "find_unused_parameters=True", "gradient_as_bucket_view=True", "bucket_cap_mb=0.0001",
               "static_graph=True", "broadcast_buffers=False"],
    "sets_epoch": [True, False],
    "workers": [0, 0, 0, 1, 2],
    **dict.fromkeys(("noisy", "evaluates", "clips", "half", "sync", "uneven", "early", "saves", "gpus"), RARE),
}  # fmt: skip
CENTRED = {"centred": "Block(lambda self, x: x - x.mean(0))"}  # depends on the samples of a chunk
BLOCKS = [*CENTRED, "tanh", "relu", "dropout", "batch norm", "layer norm", "group norm", "convolution", "frozen",
          "weight norm", "embedding", "recurrent", "attention", "tied", "twice", "recomputed", "counting"]  # fmt: skip
SAMPLERS = {
    "every other": "range(rank, len(data), world)",
    "random": "RandomSampler(data, generator=torch.Generator().manual_seed(rank))",
    "replaced": "RandomSampler(data, replacement=True, num_samples=2 * BATCH)",
    "distributed": "DistributedSampler(data)",
    "drop last": "DistributedSampler(data, drop_last=True)",
    "in order": "DistributedSampler(data, world, rank, shuffle=False)",
    "batches": "DistributedSampler(data, seed=3)",
}
LOADING = {
    "shuffled": "batch_size=BATCH, shuffle=True",
    "drop last": "batch_size=BATCH, sampler=sampler, drop_last=True",
    "batches": "batch_sampler=BatchSampler(sampler, BATCH, drop_last=False)",
}
# What a call is, and what it has written; `parts` are for each rank of the group, whose last is `root`.
CALLS = {
    "all_reduce": ("all_reduce(x, {op}, {also})", "x"),
    "reduce": ("reduce(x, root, {op}, {also})", "*([x] if rank == root else [])"),
    "broadcast": ("broadcast(x, root, {also})", "x"),
    "all_gather": ("all_gather(several, x, {also})", "*several"),
    "all_gather_into_tensor": ("all_gather_into_tensor(whole, x, {also})", "whole"),
    "reduce_scatter": ("reduce_scatter(x, parts, {op}, {also})", "x"),
    "reduce_scatter_tensor": ("reduce_scatter_tensor(x, torch.cat(parts), {op}, {also})", "x"),
    "gather": ("gather(x, several if rank == root else None, root, {also})", "*several"),
    "scatter": ("scatter(x, parts if rank == root else None, root, {also})", "x"),
    "all_to_all": ("all_to_all(several, parts, {also})", "*several"),
    "all_to_all_single": ("all_to_all_single(whole, torch.cat(parts), {also})", "whole"),
    "all_reduce_coalesced": ("all_reduce_coalesced([x, *parts], {op}, {also})", "x, *parts"),
    "all_gather_object": ("all_gather_object(several, (rank, x.tolist()), {group})", "several"),
    "gather_object": ("gather_object({{rank: root}}, several if rank == root else None, root, {group})", "several"),
    "broadcast_object_list": ("broadcast_object_list(parts, root, {group})", "parts"),
    "scatter_object_list": ("scatter_object_list(several, parts if rank == root else None, root, {group})", "several"),
    "barrier": ("barrier({also})", ""),
    "send and recv": (
        "isend(x, after, {group}) if before != rank else None\n"
        "if before != rank:\n    dist.recv(whole[: len(x)], before, {group})",
        "whole",
    ),
}
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8"]
ONE_PROCESS = ("plain", "parallel")
CHUNKED = {"dropout", "attention", "batch norm"}  # other numbers or statistics in each chunk


@dataclass(frozen=True)
class Call:
    """A collective between steps."""

    name: str = "all_reduce"
    dtype: str = "float32"
    shape: tuple[int, ...] = (2,)
    op: str = "SUM"
    later: bool = False  # it is awaited after the step
    fewer: bool = False  # in a group without rank 0

    def begun(self, number):
        """The expression that begins the call, on each rank."""
        return f"call_{number}() if rank in fewer else int" if self.fewer else f"call_{number}()"

    def lines(self, number):
        """A function that begins the call, and returns one that awaits it."""
        begun, written = CALLS[self.name]
        op = "SUM" if self.op == "AVG" and "int" in self.dtype else self.op
        group = f"group={'sub_group' if self.fewer else None}"
        words = {"op": f"dist.ReduceOp.{op}", "group": group, "also": f"{group}, async_op={self.later}"}
        values = f"{number}, {self.shape}, torch.{self.dtype}, {'fewer' if self.fewer else 'everyone'}"
        return (
            f"def call_{number}():\n"
            f"    x, parts, several, whole, root, before, after = values({values})\n"
            + textwrap.indent("work = dist." + begun.format(**words), "    ")
            + f'\n    return lambda: (work and work.wait(), log("{self.name}", {written}))'
        )


class Script(grammar.Choices):
    """The choices of a script."""

    simplest: ClassVar = {name: values[0] for name, values in CHOICES.items()} | {"blocks": (), "calls": ()}


@st.composite
def scripts(draw):
    """Draws scripts of one kind, which run one after another as one: to start processes takes longest."""
    calls = st.builds(
        Call,
        st.sampled_from([*CALLS]),
        st.sampled_from(DTYPES),
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple) | st.just((9_001,)),
        st.sampled_from(["SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX"]),
        st.booleans(),
        st.sampled_from(RARE),
    )
    chosen = {name: st.sampled_from(values) for name, values in CHOICES.items()}
    for name in "ranks", "gpus", "kind":
        chosen[name] = st.just(kind := draw(chosen[name]))
    lists = {"blocks": st.lists(st.sampled_from(BLOCKS), max_size=4), "calls": st.lists(calls, max_size=6)}
    drawn = st.builds(allowed, **chosen, **{name: each.map(tuple) for name, each in lists.items()})
    most = 1 if kind == "accelerate" else 4  # of its state there is one a process
    return draw(st.lists(drawn, min_size=1, max_size=most))


def allowed(**choices):
    """The nearest script that torch and the documentation allow."""
    s = Script(**choices)
    is_alone = s.kind in ONE_PROCESS
    if s.kind != "ddp":
        s.option, s.uneven, s.sync = "", False, False
    if s.kind in ("fsdp", "accelerate"):
        s.gpus = False
    if is_alone:
        s.calls = ()
    if s.kind == "parallel":
        s.blocks += ("centred",) * (s.samples % 2)
    if s.kind == "plain":  # whose rows may not depend on each other
        s.blocks = tuple(name for name in s.blocks if name != "centred")
    if s.sync:
        s.uneven, s.blocks = False, (*s.blocks, "batch norm")
    if s.uneven:  # ranks that have ended take part in the exchanges of the others, and in nothing else
        s.calls, s.sampler, s.early, s.accumulate, s.option = (), "every other", False, 1, ""
        s.blocks = tuple(name for name in s.blocks if name != "batch norm")
    elif s.sampler == "every other":
        s.samples -= s.samples % s.ranks
    if (is_alone or s.kind == "accelerate") and s.sampler not in ("random", "replaced"):
        s.sampler = "shuffled"
    if "batch norm" in s.blocks:  # no chunk of one sample
        s.batch, s.samples = 2 * s.ranks if is_alone else 2, 4 * s.ranks
    if s.option == "static_graph=True":
        s.accumulate = 1
    if s.kind == "fsdp":
        if s.saves and s.optimizer == "SGD":  # torch loads no state of an optimizer that has none
            s.optimizer = "SGD, momentum=0.9"
        out = ("frozen", "weight norm", *(("twice",) if s.saves else ()))  # torch loads no module of two names
        s.blocks = tuple(name for name in s.blocks if name not in out)
    s.early &= compared(s) != "words"  # other numbers end it elsewhere
    return s


def script(case):
    """The text that runs the scripts of a case in each way and compares."""
    first = case[0]
    reference = "python" if first.kind in ONE_PROCESS else "torch"
    if any(s.sync for s in case):
        reference = "none"  # torch has it for GPUs alone
    texts = [text(case), text([s.but(gpus=False) for s in case], is_reference=True)]
    return (
        f'"""Drawn by the simulator: {case!r}."""\n'
        + Path(forked_pool.__file__).read_text().split('"""\n', 1)[1]
        + Path(simulated_scripts.__file__).read_text().split('"""\n', 1)[1].replace(FROM_POOL, "")
        + "".join(f'\n\n{name} = r"""\n{each}\n"""' for name, each in zip(("SCRIPT", "ON_CPUS"), texts, strict=True))
        + f'\n\ncheck_script(SCRIPT, {first.ranks}, ON_CPUS, "{reference}")\nprint("all checks hold")\n'
    )


def text(case, is_reference=False):
    """The scripts of a case as one, in which one process group serves them all."""
    places = {"is_reference": is_reference}
    return "\n\n".join(_text(s, is_first=s is case[0], is_last=s is case[-1], **places) for s in case)


def compared(s):
    """How the lines of a script are compared with those without samestep."""
    if s.seeds == "none" or (s.kind in ONE_PROCESS and {*s.blocks} & CHUNKED):
        return "words"
    if s.ranks == 2 and s.kind not in ONE_PROCESS:
        return "bits"  # of two numbers there is one sum
    return "words" if s.half or not s.optimizer.startswith("SGD") else "rounding"


def _text(s, **places):
    """The lines of the template whose condition holds, with the choices filled in."""
    calls = [*enumerate(s.calls)]
    names = {
        **vars(s),
        **places,
        "alone": s.kind in ONE_PROCESS,
        "scaled": s.half and s.kind not in ("fsdp", "accelerate"),
        "compared": compared(s),
        "compared_first": compared(s.but(optimizer="SGD")),  # before an update magnifies what rounds otherwise
        "loading": LOADING.get(s.sampler, "batch_size=BATCH, sampler=sampler"),
        "CLASSES": grammar.CLASSES.strip(),
        "model": ", ".join(
            ["nn.Linear(6, 6)", *((grammar.BLOCKS | CENTRED)[name] for name in s.blocks), "nn.Linear(6, 3)"]
        ),
        "functions": "\n\n\n".join(call.lines(number) for number, call in calls),
        "begun": "; ".join(f"end_{n} = {call.begun(n)}" + f"; end_{n}()" * (not call.later) for n, call in calls),
        "ended": "; ".join(f"end_{n}()" for n, call in calls if call.later),
        "sampler": SAMPLERS.get(s.sampler),
        "trained": "{}(model.parameters(), lr=0.05,{})".format(*s.optimizer.partition(",")[::2]),
    }
    return grammar.rendered(TEMPLATE.read_text(), names)
