"""What the golden file asks of samestep: every import, option and field that a renaming may change is in this file.

Beside these, the golden files use the public names of `samestep` (`Run`, `Trainer`, …) and their arguments.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SEARCHED = [str(path) for path in (ROOT / "src", TESTS, TESTS / "examples", TESTS / "verify")]
sys.path[:0] = [path for path in SEARCHED if path not in sys.path]

from worlds import World, in_turns  # noqa: E402 - from a folder that was just added

BREAKERS, EXAMPLES = TESTS / "verify" / "breakers", ROOT / "examples"
OTHER_NAMES = {"api_stream": "stream", "learning_rate_scaled": "learning_rate"}  # of pages
CHECKPOINTS = "checkpoints"
NUM_CHUNKS = ("--logical-devices", "4")  # of an existing script, on any number of devices
WRAP = ("--wrap", "model")
LEDGER_FIELDS = ("step", "epoch", "position", "num_samples", "ids", "loss", "grad_norm", "lr", "skipped")

STRATEGIES = {
    "replicate": lambda size: ({"strategy": "replicate"}, None),
    "zero-1": lambda size: ({"strategy": "replicate", "shard_optimizer": True}, None),
    "sharded": lambda size: ({"strategy": "sharded"}, None),
    "pipeline": lambda size: ({"strategy": "pipeline"}, {"pipe": size}),
    "tensor": lambda size: ({}, {"data": size // 2, "tensor": 2}),
}
"""By name: from the number of ranks to the options of `Run.train_step`, and the mesh of the run."""
RECIPES = {
    "lenet": {},
    "mlp": {},
    "simplenet": {},
    "vgg": {"width": 0.0625},
    "gpt": {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1, "tied": False},
}
"""Arguments of their models."""


def parallelize(run, model):
    """Divides the first two linear layers of a recipe's model, or those behind each attention, over "tensor"."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)][:2]
    first, second = ("blocks.*.feed_in", "blocks.*.feed_out") if hasattr(model, "blocks") else layers
    parallelize_module(model, run.mesh["tensor"], {first: ColwiseParallel(), second: RowwiseParallel()})


def whole_state(step):
    """Parameters, buffers and optimizer state of a step in their order, each whole; all ranks call it."""
    from samestep.checkpoint.digest import named_state
    from samestep.checkpoint.local_shards import unsharded

    return [unsharded(value, step.state_communicator) for _, value in named_state(step)]


@cache
def recipe_data(name, num_train, num_test):
    """Tensors of some of a recipe's training and test samples; nothing is drawn."""
    from samestep.data.named import bytes_to_unit, image_data, text_data
    from samestep.recipes import lenet, mlp

    if name == "mlp":
        sets = mlp.read_table(None, None, 0)
    elif name == "gpt":
        sets = text_data(ROOT / "LICENSE", RECIPES[name]["context"])  # the embedded one is a part of this Python
    else:
        sets = image_data(transform=bytes_to_unit if name == "vgg" else lenet.standardize)
    parts = []
    for dataset, count in zip(sets[:2], (num_train, num_test), strict=True):
        columns = zip(*(dataset[index] for index in range(count)), strict=True)
        parts.append(tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in columns))
    return parts


def recipe(name, num_train, num_test):
    """A recipe's model, newly drawn, its loss and metrics, training and test data."""
    from importlib import import_module

    from samestep.doctor.proof_programs import StagedGpt

    found, (train, test) = import_module(f"samestep.recipes.{name}"), recipe_data(name, num_train, num_test)
    options = {"features": train[0].shape[1]} if name == "mlp" else RECIPES[name]
    model = StagedGpt(**options) if name == "gpt" else found.make_model(**options)
    return model, found.loss_fn, found.METRICS, train, test


def turns(size, program, *arguments):
    """Runs a program on ranks that take turns in this process; the results by rank."""
    return in_turns(size, program, *arguments)


@contextmanager
def open_world(label):
    """Ranks with `run(program, *arguments)`: the results by rank.

    "3" take turns in this process; "3 processes", "3 gloo" and "3 nodes" (of two and one rank) are real processes. In
    "here" there are none, and in "verify" is what `judging` gives.
    """
    size, _, transport = label.partition(" ")
    if label == "here":
        yield None
    elif label == "verify":
        with judging() as judge:
            yield judge
    elif not transport:
        yield SimpleNamespace(run=partial(turns, int(size)))
    else:
        kind = {"processes": "shared", "gloo": "gloo", "nodes": "auto"}[transport]
        world = World(int(size), kind, nodes=(2, 1) if transport == "nodes" else None)
        try:
            yield world
        finally:
            world.close()


def command(folder, *words):
    """Runs `samestep WORDS` in a folder; what it printed on stdout."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "samestep", *map(str, words)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"samestep {words[0]} ended with {done.returncode}: {done.stderr[-300:]}"
    return done.stdout


def run_words(devices, script, *arguments, options=()):
    """The words that run a script on CPU workers."""
    return "run", "--devices", f"cpu:{devices}", *options, script, *arguments


def train_words(devices, folder, recipe, *options):
    """The words that train a recipe on CPU workers."""
    return "train", recipe, "--devices", f"cpu:{devices}", "--run-dir", folder, *options


def epochs_of(run):
    """The loss and the scores of each epoch, by the checkpoint at the end of a run."""
    state = json.loads((max((run / CHECKPOINTS).glob("step-*")) / "state.json").read_text())
    return [(epoch["train_loss"], epoch["eval"]) for epoch in state["run"]["rest"]["history"]]


def example(communicator, name, arguments, folder, wrap):
    """Runs an example as an existing script, four chunks a forward; what it printed."""
    from example_programs import run_example

    return run_example(communicator, name, arguments, folder, int(NUM_CHUNKS[1]), *wrap[1:] or [None])[0]


def weights(run):
    """The tensors of the weights that a run left."""
    from safetensors.torch import load_file

    return load_file(run / "weights.safetensors")


def ledger_lines(run):
    """The steps of a run's ledger without times and devices, and apart from them the checksums of the state."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    for line in steps:
        line["step"] -= 1  # the recorded digests count from 0
    return [[line[name] for name in LEDGER_FIELDS] for line in steps], [line.get("digest") for line in steps]


def replayed(run, step, program):
    """What the replay of a step shows of it: whether it was the recorded one, its samples and numbers."""
    from samestep.replay.replaying import replay

    found = replay(run, step + 1, program=program)
    view = found.view
    parts = [[part.loss, part.grad_norm, list(part.samples)] for part in view.microbatches]
    return found.holds, found.check.same_bits, view.loss, view.grad_norm, list(view.samples), parts


def breaker(name, folder):
    """The script with a cause: one of the tests, or else that of the documentation, written into the folder."""
    from cause_pages import section

    if (BREAKERS / f"{name}.py").exists():
        return BREAKERS / f"{name}.py"
    script = folder / f"{name}.py"
    script.write_text(section(OTHER_NAMES.get(name, name))[0], encoding="utf-8")
    return script


@contextmanager
def judging():
    """`judge(script, devices, steps, tier)`: the causes that `samestep verify` names, and the first step at fault."""
    from samestep.devices.selection import select
    from samestep.launcher.job import Job
    from samestep.launcher.supervisor import supervise
    from samestep.verify.program_runner import KeptPool, ProgramRunner, VerifiedProgram
    from samestep.verify.verdict import reach_verdict

    alone = select("cpu:1")
    pool = KeptPool.make(alone)
    supervise(Job("function", "os:getpid", quiet=True), alone, open_pool=lambda: pool)

    def judge(script, devices, steps, tier):
        program = VerifiedProgram("script", str(script), (), None, str(script))
        with ProgramRunner(program, {name: select(name) for name in devices}, hang_seconds=120.0, pool=pool) as runner:
            found = reach_verdict(runner, devices, steps, tier)
        return sorted(
            cause.key for cause in found.causes
        ), None if found.difference is None else found.difference.step - 1

    try:
        yield judge
    finally:
        pool.end()
