"""Mutated checkpoints with right checksums, loaded in a process of limited memory: `checkpoint_fuzz.py FOLDER COUNT`.

Each is refused by an error of samestep, or what was loaded is what the checkpoint says. Prints how many were refused,
the same as before the mutation, and other ones.
"""

import copy
import hashlib
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter, OrderedDict
from contextlib import ExitStack, redirect_stdout, suppress
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from samestep.checkpoint.contract import loader_contract, step_contract
from samestep.checkpoint.packing import pack, unpack
from samestep.checkpoint.resume import check_state, read_state
from samestep.checkpoint.state import model_tensors
from samestep.checkpoint.storage import begin_checkpoint, complete_checkpoint, read_checkpoint
from samestep.checkpoint.verified_files import MANIFEST_FILE, Manifest, Written, manifest_bytes, read_manifest
from samestep.comm.communicator import Communicator
from samestep.comm.sequential import SequentialWorld
from samestep.engine.generator_states import generator_states
from samestep.errors import SamestepError
from samestep.run.progress import Progress
from samestep.run.run import Run

SECONDS, MORE_BYTES, LONGEST = 60, 1 << 30, 3_000
KINDS = ("loop", "trainer", "parts")
STEP = "step-00000003"
CPU = torch.device("cpu")
REST = {  # every sort of value that a state may have
    "numbers": [1, -(2**80), 0.5, float("nan"), float("-inf"), -0.0, True, None, np.float32(3)],
    "texts": ("a", "größe", {"b": 1, "$c": 2}, {3: 4, (5,): 6}),
    "arrays": [np.arange(6.0).reshape(2, 3), np.array([True]), np.ones(2, np.complex128)],
    "tensors": [torch.arange(6).view(2, 3).t(), torch.ones(2, dtype=torch.bool)],
    "others": [OrderedDict(a=1), Counter("aab"), torch.ones(2, dtype=torch.complex128)],
}


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


class Program:
    """A model in training, as it is built anew for each case."""

    def __init__(self, communicator=None):
        torch.manual_seed(0)
        self.run = Run(8, 4, 0, communicator=communicator)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        strategy = "replicate" if communicator is None else "zero1"
        self.step = self.run.train_step(self.model, optimizer, loss, scheduler=schedule, strategy=strategy)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(40, 4, generator=generator), torch.randint(2, (40,), generator=generator)
        self.loader = self.run.loader(data, shuffle=True)
        self.progress = Progress(self.run, self.step, None)
        self.contract = {**self.run.contract.as_json(), **step_contract(self.step), **loader_contract(self.loader)}

    def train(self, num_steps):
        for _, batch in zip(range(num_steps), self.loader, strict=False):
            self.step(batch)

    def save(self, kind, folder):
        """Writes a checkpoint, as `Trainer` does or by the loop's own call: of two ranks in part files."""
        self.train(3)
        if kind != "trainer":
            self.run.save_checkpoint(folder, self.step, self.loader, REST)
            return
        state = self.progress.capture(self.loader, self.loader.state_dict(), self.contract)
        with ExitStack() as until:
            complete_checkpoint(folder, state, begin_checkpoint(until, folder, 3, False), {}, 3, False)

    def load(self, kind, path):
        """Takes up a checkpoint; pairs of what is there now and what the checkpoint says."""
        snapshot = read_checkpoint(path)
        if kind == "trainer":
            state = read_state(path)
            check_state(self.step, state, self.contract, False, None, print)
            self.progress.restore(state)
            self.progress.go_on(self.loader)
        else:
            rest = self.run.load_checkpoint(path, self.step, self.loader)
        there = unpack(snapshot.facts["run"], snapshot.files["rest"])
        yield self.step.num_steps, snapshot.step
        yield dict(model_tensors(self.model)), snapshot.files["model"]
        yield self.loader.state_dict(), there["rest"]["cursor"]
        ours = generator_states(CPU)
        for now, state in zip(ours["torch"], there["generators"]["torch"], strict=False):
            generator = torch.Generator()  # which leaves out what it does not use
            generator.set_state(state)
            yield now, generator.get_state()
        yield [ours[name] for name in ("python", "numpy")], [there["generators"][name] for name in ("python", "numpy")]
        if kind == "trainer":
            state = self.progress.capture(self.loader, None, self.contract)
            kept = unpack(state.facts["run"], state.files["rest"])["rest"]
            yield [kept[name] for name in ("history", "epoch")], [there["rest"][name] for name in ("history", "epoch")]
        else:
            yield rest, there["rest"]["rest"] if there["rest"]["rest"] is not None else {}

    def go_on(self):
        """Uses what was loaded: whatever it is, the process lives."""
        for use in (lambda: self.train(1), np.random.normal, random.random, lambda: torch.randn(3)):
            with suppress(Exception):
                use()


def save(kind, folder):
    """Writes a checkpoint of a kind."""
    if kind == "parts":
        SequentialWorld(2).run(lambda each: Program(Communicator(CPU, each, each)).save(kind, folder))
    else:
        Program().save(kind, folder)


def text_of(value):
    """A value as text that tells its types and bits."""
    packed = pack(value, "")
    bits = {name: t.contiguous().reshape(-1).view(torch.uint8).tolist() for name, t in sorted(packed.tensors.items())}
    return json.dumps([packed.facts, bits], sort_keys=True)


@cache
def content_of(path):
    """All that a good checkpoint says."""
    snapshot = read_checkpoint(path)
    files = {name: dict(sorted(tensors.items())) for name, tensors in sorted(snapshot.files.items())}
    return text_of(files), json.dumps(snapshot.facts, sort_keys=True), snapshot.step


TEXTS = [*(b"", b"null", b"[]", b"{}", b"{", b'"\xff"', b"\xef\xbb\xbf{}", b"0", b"NaN", b"9" * 5000, b"-1e999")]
TEXTS += [b"[" * 200_000, b"[" * 500 + b"]" * 500, b'{"a":' * 300 + b"1" + b"}" * 300, b'"\\ud800"', b'{"format": 1}']
NUMBERS = [0, -1, 3, 625, 2**31, 2**62, -(2**63), 10**12, 10**4000, 0.5, 1e308, float("inf"), float("nan")]
WORDS = [
    "\0",
    "\ud800",
    "../x",
    "/dev/zero",
    "a" * 5000,
    "O",
    "float32",
    "float64",
    "bool",
    "F32",
    "<f8",
    "1e400",
    "cpu",
]
KEYS = ["$", "$new", "$x", "$scalar", "$array", "$tuple", "$dict", "$ordered_dict", "$counter", "$float", "$tensor"]
KEYS += ["metadata", "stride", "dtype", "parameter", "requires_grad", "fused", "foreach", "a\0"]


def values(names):
    """Draws trees of JSON, with what a packed state has, and names of tensors."""
    leaves = st.none() | st.booleans() | st.sampled_from([*NUMBERS, *WORDS, *names])
    tensors = st.sampled_from(names).map(lambda name: {"$tensor": name})
    strides = st.sampled_from(([10**12], [2**62, 1], [0, 0], [-1], [1, 1], "ab", [1.0, 1.0], [1, 6], [True]))
    strided = st.builds(lambda tensor, stride: {**tensor, "stride": stride}, tensors, strides)
    return st.recursive(
        leaves | tensors | strided,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=2),
        max_leaves=4,
    )


def places(value):
    """All (container, key) of a tree of JSON."""
    found, level = [], [value]
    while level:
        above = level.pop()
        for key in above if isinstance(above, dict) else range(len(above)):
            found.append((above, key))
            if isinstance(above[key], dict | list):
                level.append(above[key])
    return found


def mutate_tree(draw, tree, names):
    """Changes, in place, one thing or a few in a tree of JSON."""
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 5]))):
        found = places(tree)
        numbers = [(above, key) for above, key in found if isinstance(above[key], bool | int | float)]
        how = draw(st.sampled_from(["counted"] * 3 + ["other", "gone", "copied", "renamed", "wrapped"]))
        if not (found := numbers if how == "counted" else found):
            return
        (above, key), (other, name) = (draw(st.sampled_from(found)) for _ in range(2))
        if how == "other":
            above[key] = draw(values(names))
        elif how == "gone":
            del above[key]
        elif how == "copied":
            above[key] = copy.deepcopy(other[name])
        elif how == "renamed" and isinstance(above, dict):
            above[draw(st.sampled_from(KEYS))] = above.pop(key)
        elif how == "wrapped":
            above[key] = draw(st.sampled_from(([above[key]], {"$tuple": [above[key]]}, {"$scalar": above[key]})))
        elif how == "counted":
            above[key] = draw(st.sampled_from((-above[key], above[key] + 1, not above[key], str(above[key]), 2**60)))


def mutate(draw, folder):
    """Changes a file of a checkpoint, which the manifest then lists as it is."""
    path = draw(st.sampled_from([folder / "state.json"] * 4 + sorted(folder.iterdir())))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else None
    text, behind = (data, b"") if size is None else (data[8 : 8 + size], data[8 + size :])
    how = draw(st.integers(0, 11))
    if how == 0:
        text = draw(st.sampled_from(TEXTS))
    elif how == 1:
        at = draw(st.integers(0, len(data) - 1))
        path.write_bytes(draw(st.sampled_from((data[:at], data + b"123", data[:at] + b"~" + data[at + 1 :]))))
        return seal(folder, path)
    else:
        tree = json.loads(text)
        tree.pop("checksum", None)
        run = tree.get("run")  # the large trees of generators would take most of the changes of the whole
        of_state = [tree, *([tree["optimizers"], run, run["rest"], run["steps"], run["generators"]] if run else ())]
        names = ["optimizer.0.state.0.exp_avg", "rest.arrays.0", "0.weight", *list(tree)[:9]]
        mutate_tree(draw, draw(st.sampled_from(of_state)), names)
        text = json.dumps(tree, separators=(",", ":")).encode()
    head = b"" if size is None else draw(st.sampled_from((len(text),) * 7 + (2**63,))).to_bytes(8, "little")
    path.write_bytes(head + text + behind)
    return seal(folder, path)


def seal(folder, path):
    """Gives the manifest the checksum that it has to have, for which it may have to list a file as it is now."""
    data = path.read_bytes()
    if path.name == MANIFEST_FILE:
        head = data.rstrip().removesuffix(b"}") + b',\n  "checksum": "'
        path.write_bytes(head + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n')
    else:
        manifest = read_manifest(folder)
        files = {**manifest.files, path.name: Written(len(data), hashlib.sha256(data).hexdigest())}
        (folder / MANIFEST_FILE).write_bytes(manifest_bytes(Manifest(manifest.step, files)))


def outcome_of(draw, bases, path):
    """Mutates a checkpoint and loads it."""
    kind = draw(st.sampled_from(KINDS))
    shutil.copytree(bases / kind / STEP, path)
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        with suppress(ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
            mutate(draw, path)  # the first one may have left nothing that the second knows
    program = Program()
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(None):
            loaded = list(program.load(kind, path))
        content = content_of.__wrapped__(path)
    except SamestepError as error:
        return "refused" if len(str(error)) < LONGEST else f"refused in {len(str(error))} characters"
    finally:
        signal.alarm(0)
    for now, there in loaded:
        assert text_of(now) == text_of(there), (now, there)
    program.go_on()
    return "same" if content == content_of(bases / kind / STEP) else "other"


def main(folder, count):
    torch.set_num_threads(1)
    for kind in KINDS:
        save(kind, folder / kind)
    limit, counts = psutil.Process().memory_info().vms + MORE_BYTES, Counter()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(st.data())
    def load_one(data):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            counts[outcome_of(data.draw, folder, Path(place) / STEP)] += 1

    load_one()
    print(dict(counts))
    assert counts.keys() == {"refused", "same", "other"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
