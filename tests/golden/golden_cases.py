"""The golden matrix: what is run, on which ranks, and what a digest covers.

A program is `program(ranks, seed, folder, *arguments)`. On ranks it has a communicator and returns content; in the
world "here" it has none and returns contents by label, and in "verify" `ranks` is a function that judges scripts.
"""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from golden_worlds import ROOT, TESTS, in_turns
from torch import nn
from torch.nn import functional

import samestep

BREAKERS = TESTS / "verify" / "breakers"
OTHER_NAMES = {"api_stream": "stream", "learning_rate_scaled": "learning_rate"}  # of pages
NUM_CHUNKS = ("--logical-devices", "4")  # of an existing script, on any number of devices
WRAP = ("--wrap", "model")
LEDGER_FIELDS = ("step", "epoch", "position", "num_samples", "ids", "loss", "grad_norm", "lr", "skipped")
STRATEGIES = {
    "replicate": {"strategy": "replicate"},
    "zero-1": {"strategy": "zero1"},
    "sharded": {"strategy": "sharded"},
}
"""By name: the options of `Run.train_step`."""
RECIPES = {
    "lenet": {},
    "mlp": {},
    "simplenet": {},
    "vgg": {"width": 0.0625},
    "gpt": {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1, "tied": False},
}
"""Arguments of their models."""
TURNS, REAL = ("1", "2", "3"), ("1 processes", "2 processes", "3 processes")
TWO, TWO_AND_THREE = REAL[1:2], REAL[1:]
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Case:
    """An entry: a program with equal results in all its worlds (`golden_worlds.open_world`), as others of its group."""

    program: Callable
    arguments: tuple = ()
    worlds: tuple[str, ...] = TURNS
    group: str = ""


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def whole_state(step):
    """Parameters, buffers and optimizer state of a step in their order, each whole; all ranks call it."""
    from samestep.checkpoint.digest import named_state
    from samestep.checkpoint.local_shards import unsharded

    return [unsharded(value, step.communicator) for _, value in named_state(step)]


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


def drawn_recipe(name, num_train, num_test):
    """A recipe's model, newly drawn, its loss and metrics, training and test data."""
    found, (train, test) = import_module(f"samestep.recipes.{name}"), recipe_data(name, num_train, num_test)
    options = {"features": train[0].shape[1]} if name == "mlp" else RECIPES[name]
    model = found.Gpt(**options) if name == "gpt" else found.make_model(**options)
    return model, found.loss_fn, found.METRICS, train, test


def take_steps(step, batches):
    """Loss, gradient norm and size of each step."""
    results = [step(batch) for batch in batches]
    return [(result.loss, result.grad_norm, result.num_samples) for result in results]


def recipe(communicator, seed, folder, name, precision, optimizer, strategy):
    """Three steps of a recipe, the last one ragged, and its evaluation."""
    run = samestep.Run(8, 4, seed, communicator=communicator)
    model, loss, metrics, train, test = drawn_recipe(name, 21, 9)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    step = run.train_step(model, optimizer, loss, precision=precision, max_grad_norm=1.0, **STRATEGIES[strategy])
    loader = run.loader(train, shuffle=True)
    epochs = 6 if name in ("mlp", "gpt") and precision == "16-mixed" else 1  # they overflow until they are scaled down
    steps = [take_steps(step, loader) for _ in range(epochs)]
    return steps, run.evaluate(model, test, metrics), whole_state(step)


class Small(nn.Sequential):
    """Convolution, BatchNorm unless told otherwise, dropout: `[n, 1, 6, 6]` to `[n, 3]`."""

    def __init__(self, norm=True):
        first = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU(), nn.Flatten()]
        super().__init__(*first, nn.Dropout(0.3), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))


def images(count, first=0.0):
    """Images and labels, drawn once and for all; something may be added to the first pixel."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 1, 6, 6, generator=generator)
    x[0, 0, 0, 0] += first
    return x, torch.randint(0, 3, (count,), generator=generator)


class OneByOne(torch.utils.data.Dataset):
    """The images one after another, each with noise."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x, y = (column[index] for column in images(40))
        return x + 0.1 * torch.rand(()), y


def each(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean(model, batch):
    return each(model, batch).mean()


def masked(model, batch):
    kept = batch[1] != 1
    return samestep.Mean((each(model, batch) * kept).sum(), kept.sum())


def by_counts(model, batch, counts):
    return each(model, batch).sum() / counts["ones"]


def ones(batch):
    return {"ones": 1 + (batch[1] == 1).sum()}


RECOMPUTED, HALF = samestep.Sharded(activation_checkpointing=True), samestep.Sharded(param_dtype="bf16")
KEPT = samestep.Sharded(reshard_after_forward=False)
FEATURES = {
    "plain": ({}, (*TURNS, "5", "3 gloo", "3 nodes", "4 processes"), "plain"),
    "small buckets": ({"bucket_bytes": 256, "overlap": False}, TURNS, "plain"),
    "sharded, kept": ({"strategy": KEPT}, TWO, "plain"),
    "no norm": ({"norm": False}, TURNS, "no norm"),
    "no norm, recomputed": ({"norm": False, "strategy": RECOMPUTED}, TWO_AND_THREE, "no norm"),
    "no norm, half parameters": ({"norm": False, "strategy": HALF}, TWO_AND_THREE, ""),
    "one by one": ({"data": OneByOne()}, TURNS, "one by one"),
    "one by one, workers": ({"data": OneByOne(), "num_workers": 2}, REAL[:2], "one by one"),
    "fewer samples than microbatches": ({"batch": 8, "cuts": 12, "samples": 20}, ("1", "3", "7"), ""),
    "one microbatch": ({"cuts": 1}, ("1",), ""),
    "five microbatches, unequal shares": ({"cuts": 5, "shares": True}, TURNS, ""),
    "clipped": ({"max_grad_norm": 0.05}, TURNS, ""),
    "scheduled": ({"gamma": 0.7}, TURNS, ""),
    "loss a sample": ({"loss": each}, TURNS, ""),
    "masked loss": ({"loss": masked}, TURNS, ""),
    "counted loss": ({"loss": by_counts, "counts_fn": ones}, TURNS, ""),
    "overflow skipped": ({"first": math.inf, "on_nonfinite": "skip"}, TURNS, ""),
    "batches of its own": ({"own": True}, TURNS, ""),
    "draws afterwards": ({"draws": True}, REAL, ""),  # ranks that take turns draw from one generator
    "16 bits": ({"precision": "16-mixed", "batch": 64}, TURNS, ""),
}
"""Options of `feature` (the rest are those of `train_step`), worlds, and a group."""


def feature(communicator, seed, folder, name):
    """Two epochs of the small model; evaluation and prediction."""
    options = dict(FEATURES[name][0])
    take = options.pop
    shares = [5, 1, 2][: communicator.world_size] if take("shares", False) else None
    run = samestep.Run(take("batch", 32), take("cuts", 8), seed, communicator=communicator, shares=shares)
    model, own, draws = Small(take("norm", True)), take("own", False), take("draws", False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if "gamma" in options:
        options["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, take("gamma"))
    data = take("data", None) or images(take("samples", 75), take("first", 0.0))
    loader = run.loader(data, shuffle=True, num_workers=take("num_workers", 0))
    step = run.train_step(model, optimizer, take("loss", mean), **options)
    if own:
        loader = list(zip(*(column.split(30) for column in data), strict=True))
    steps = [take_steps(step, loader) for _ in range(2)]
    x, y = images(23)
    scores = run.evaluate(model, (x, y), {"accuracy": samestep.metrics.accuracy, "2": samestep.metrics.top_k(2)})
    drawn = torch.rand(2) if draws else None
    return steps, scores, run.predict(model, x), drawn, whole_state(step)


def adversaries(communicator, seed, folder):
    """Two steps over two models, in turns: a GAN."""
    run = samestep.Run(16, 4, seed, communicator=communicator)
    maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 1))
    loader = run.loader(torch.randn(40, 4), shuffle=True)

    def judged(model, batch):
        made = maker(torch.randn(len(batch), 3)).detach()
        return functional.softplus(-model(batch)).mean() + functional.softplus(model(made)).mean()

    def made(model, batch):
        return functional.softplus(-judge(model(torch.randn(len(batch), 3)))).mean()

    first = run.train_step(judge, OPTIMIZERS["adam"](judge.parameters()), judged)
    second = run.train_step(maker, OPTIMIZERS["adam"](maker.parameters()), made)
    steps = [take_steps(first, [batch]) + take_steps(second, [batch]) for batch in loader]
    return steps, whole_state(first), whole_state(second)


def own_loop(communicator, seed, folder, leave_at=None, on_loss=lambda run, step: None):
    """Two epochs in a loop of one's own; leaves in the middle of the first, and goes on from what is in the folder."""
    run = samestep.Run(16, 8, seed, communicator=communicator)
    model = Small()

    def loss(model, batch):
        on_loss(run, step)
        return mean(model, batch)

    step = run.train_step(model, OPTIMIZERS["adamw"](model.parameters()), loss)
    loader = run.loader(images(70), shuffle=True)
    steps = (run.load_checkpoint(folder, step, loader) or {"steps": []})["steps"]
    while len(steps) < 10:
        for batch in loader:
            steps.append(step(batch).loss)
            if len(steps) == leave_at:
                run.save_checkpoint(folder, step, loader, {"steps": steps})
                return None
    return steps, whole_state(step)


def resumed(_, seed, folder):
    """A loop on one device, and one that stops on three and goes on on two."""
    (whole,) = in_turns(1, own_loop, seed, folder / "a")
    in_turns(3, own_loop, seed, folder / "b", 3)
    return {"1": whole, "3, then 2": in_turns(2, own_loop, seed, folder / "b")[1]}


def call(folder, *words):
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


def healed(_, seed, folder):
    """A loop of which one of three workers is killed, and the same one undisturbed."""
    call(folder, *run_words(3, Path(__file__).with_name("killed_worker.py"), folder, seed))
    assert (folder / "killed").exists(), "no worker was killed"
    return {"1": in_turns(1, own_loop, seed, folder / "1")[0], "3": saved(folder / "result.pt")}


def by_trainer(communicator, seed, folder, resume=None):
    """Two epochs by the Trainer, with evaluation, ledger and checkpoints."""
    run = samestep.Run(16, 4, seed, communicator=communicator)
    model = Small()
    options = {"checkpoint_steps": 2, "keep": 9, "digest_every": 2, "max_grad_norm": 1.0}
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with samestep.Trainer(run, model, optimizer, mean, run_dir=folder, **options) as trainer:
        metrics = {"accuracy": samestep.metrics.accuracy}
        trainer.fit(images(70), 2, eval_data=images(23), metrics=metrics, resume=resume)
        history = [(record.train_loss, record.eval["accuracy"]) for record in trainer.history]
        return history, whole_state(trainer.step)


def trained(_, seed, folder):
    """A run by the Trainer on one and three devices, and on two from the middle of its first epoch."""
    found = {size: in_turns(int(size), by_trainer, seed, folder / size)[0] for size in ("1", "3")}
    middle = folder / "3" / "checkpoints" / "step-00000002"
    return found | {"3, then 2": in_turns(2, by_trainer, seed, folder / "2", middle)[0]}


def ledger_lines(run):
    """The steps of a run's ledger without times and devices, and apart from them the checksums of the state."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    for line in steps:
        line["step"] -= 1  # the recorded digests count from 0
    return [[line[name] for name in LEDGER_FIELDS] for line in steps], [line.get("digest") for line in steps]


def ledger(_, seed, folder, part):
    """What the ledgers of runs on one to three devices say of each step (0), or their checksums of the state (1)."""
    for size in TURNS:
        in_turns(int(size), by_trainer, seed, folder / size)
    return {size: ledger_lines(folder / size)[part] for size in TURNS}


def replayed(run, step, program):
    """What the replay of a step shows of it: whether it was the recorded one, its samples and numbers."""
    from samestep.replay.replaying import replay

    found = replay(run, step + 1, program=program)
    view = found.view
    parts = [[part.loss, part.grad_norm, list(part.samples)] for part in view.microbatches]
    return found.holds, found.check.same_bits, view.loss, view.grad_norm, list(view.samples), parts


def replay(_, seed, folder):
    """A step of a run on three devices, taken again on one."""
    in_turns(3, by_trainer, seed, folder / "run")
    return {"step 7": replayed(folder / "run", 7, lambda: by_trainer(None, seed, folder / "run"))}


def saved(path):
    return torch.load(path, weights_only=False)


EXAMPLES = {
    "random_linear": ([], ()),
    "house_prices": (["--epochs", 3, "--out", "curves"], ()),
    "vgg_parts": (["--epochs", 1, "--samples", 42, "--batch-size", 16, "--workers", 0], ()),
    "from_scratch": (["--epochs", 2, "--samples", 45, "--batch-size", 23, "--num-devices", 4], ()),
    "simple_gpu": (["--epochs", 2, "--samples", 100], WRAP),
    "detection": (["--epochs", 2, "--samples", 12, "--batch-size", 7], ()),
}


def example(communicator, seed, folder, name):
    """An example as an existing script: what it prints, without devices and times, and what it saves."""
    from example_programs import run_example

    folder.mkdir(exist_ok=True)
    arguments, wrap = EXAMPLES[name]
    said = run_example(
        communicator, name, [*arguments, "--save", "saved.pt"], folder, int(NUM_CHUNKS[1]), *wrap[1:] or [None]
    )[0]
    return None if communicator.rank else (numbers_of(said), saved(folder / "saved.pt"))


def numbers_of(text):
    """The lines that hold a loss or the like, without times."""
    return re.findall(r"^(?:epoch|test|outside).*?(?=, \d+\.\d s$|, processes|$)", text, flags=re.MULTILINE)


def commanded(_, seed, folder, devices, name, arguments, options):
    """An example by the command line."""
    path = ROOT / "examples" / f"{name}.py"
    said = call(folder, *run_words(devices, path, *arguments, "--save", "saved.pt", options=options))
    return {str(devices): (numbers_of(said), saved(folder / "saved.pt"))}


def train_words(devices, folder, recipe, *options):
    """The words that train a recipe on CPU workers."""
    return "train", recipe, "--devices", f"cpu:{devices}", "--run-dir", folder, *options


def epochs_of(run):
    """The loss and the scores of each epoch, by the checkpoint at the end of a run."""
    state = json.loads((max((run / "checkpoints").glob("step-*")) / "state.json").read_text())
    return [(epoch["train_loss"], epoch["eval"]) for epoch in state["run"]["rest"]["history"]]


def weights(run):
    """The tensors of the weights that a run left."""
    from safetensors.torch import load_file

    return load_file(run / "weights.safetensors")


def train_command(_, seed, folder, all_devices, *arguments):
    """A recipe by the command line: its scores, its ledger and its weights."""
    found = {}
    for devices in all_devices:
        run = folder / str(devices)
        call(folder, *train_words(devices, run, *arguments, "--seed", seed))
        found[str(devices)] = epochs_of(run), ledger_lines(run)[0], weights(run)
    return found


MLP_OPTIONS = ["--epochs", 2, "--strategy", "sharded", "--num-microbatches", 8]
BY_TWO = """
augmentation batchnorm buffers draws dropout flags global_batch learning_rate_scaled learning_rate_stepped local_clip
loss_scale mean_of_means metrics module_state order own_generator sampler unseeded unshared unused clean
api_dataset_generator api_loss_draws api_module_state api_stream
"""
VERDICTS = {
    **dict.fromkeys(BY_TWO.split(), (("cpu:1", "cpu:2"), 6, None)),
    **dict.fromkeys(("rounding", "nondeterministic"), (("cpu:1", "cpu:2"), 4, "bitwise")),
}
"""Devices, steps and tier by breaker."""


def breaker(name, folder):
    """The script with a cause: one of the tests, or else that of the documentation, written into the folder."""
    from cause_pages import section

    if (BREAKERS / f"{name}.py").exists():
        return BREAKERS / f"{name}.py"
    script = folder / f"{name}.py"
    script.write_text(section(OTHER_NAMES.get(name, name))[0], encoding="utf-8")
    return script


def verdict(judge, seed, folder, name):
    """The causes of a breaker, and the first step at fault, in"""
    causes, step = judge(breaker(name, folder), *VERDICTS[name])
    if name in causes and name == "nondeterministic":
        return {"verify": name}  # the rest is left to chance
    return {"verify": f"{', '.join(causes) or 'none'}; step {step}"}


def worlds_of(precision, optimizer, strategy):
    """Where a recipe runs: what needs processes of its own on fewer numbers of them."""
    once = (precision, optimizer) == ("32-true", "adamw")
    if strategy == "replicate":
        return (*TURNS, *TWO) if once else TURNS
    if strategy == "zero-1":
        return TURNS[1:]
    return TWO_AND_THREE if once else TWO


def all_cases():
    """The matrix, by name."""
    cases = {}
    for key in ((r, p, o, s) for r in RECIPES for p in PRECISIONS for o in OPTIMIZERS for s in STRATEGIES):
        if key[2:] != ("fused", "sharded"):  # refused: parts of a tensor would be rounded otherwise
            cases[" ".join(("recipe", *key))] = Case(recipe, key, worlds_of(*key[1:]), " ".join(key[:3]))
    cases |= {f"feature {name}": Case(feature, (name,), *rest) for name, (_, *rest) in FEATURES.items()}
    cases |= {f"example {name}": Case(example, (name,), REAL) for name in EXAMPLES}
    cases |= {f"verify {name}": Case(verdict, (name,), ("verify",)) for name in VERDICTS}
    cases["feature gan"] = Case(adversaries)
    here = {
        "resume loop": (resumed,),
        "resume trainer": (trained,),
        "healed": (healed,),
        "ledger steps": (ledger, 0),
        "ledger checksums": (ledger, 1),
        "replay": (replay,),
        "command house_prices": (commanded, 3, "house_prices", EXAMPLES["house_prices"][0], NUM_CHUNKS),
        "command wrap": (commanded, 2, "simple_gpu", *EXAMPLES["simple_gpu"][:1], NUM_CHUNKS + WRAP),
        "command ddp": (commanded, 2, "ddp", ["--epochs", 2, "--samples", 200], ()),
        "command train lenet": (train_command, (1, 3), "lenet", "--epochs", 1, "--global-batch-size", 256),
        "command train mlp": (train_command, (2,), "mlp", *MLP_OPTIONS),
    }
    return cases | {name: Case(program, tuple(rest), ("here",)) for name, (program, *rest) in here.items()}


CASES = all_cases()


def on_ranks(communicator, seed, folder, name):
    """Runs a case on a rank; the digest of its content."""
    return digest(CASES[name].program(communicator, seed, folder, *CASES[name].arguments))


def digest(content):
    """SHA-256 over numbers and tensors to the bit, in order, as 16 digits; a text as it is, None for nothing."""
    if content is None or isinstance(content, str):
        return content
    hasher = hashlib.sha256()
    _add(hasher, content)
    return hasher.hexdigest()[:16]


def _add(hasher, content):
    if isinstance(content, torch.Tensor):
        hasher.update(f"{content.dtype} {list(content.shape)}\n".encode())
        hasher.update(content.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(content, dict | list | tuple):
        hasher.update(b"[")
        for value in content.values() if isinstance(content, dict) else content:
            _add(hasher, value)
        hasher.update(b"]")
    else:
        hasher.update(f"{content.hex() if isinstance(content, float) else content!r}\n".encode())
