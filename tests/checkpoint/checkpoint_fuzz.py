"""Mutated checkpoints with right checksums, loaded one after another; run as a program: FOLDER SEED FIRST COUNT.

Each case prints its number and what came of it: "refused" (by an error of samestep), "same" (as before the mutation),
"other" (values that a state may have, and they are what was loaded). Anything else ends the program.
"""

import copy
import hashlib
import json
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter, OrderedDict
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn import functional

from samestep.checkpoint.contract import loader_contract, step_contract
from samestep.checkpoint.packing import pack, unpack
from samestep.checkpoint.resume import check_state, read_state
from samestep.checkpoint.state import capture, model_tensors
from samestep.checkpoint.storage import Snapshot, begin_checkpoint, complete_checkpoint, read_checkpoint
from samestep.checkpoint.verified_files import (
    MANIFEST_FILE,
    Manifest,
    Written,
    manifest_bytes,
    part_name,
    read_manifest,
    write_part,
)
from samestep.engine.generator_states import generator_states
from samestep.engine.sharded_state import LocalShard, by_rows
from samestep.errors import SamestepError
from samestep.run.progress import Progress
from samestep.run.run import Run

SECONDS, MORE_BYTES, LONGEST = 60, 1 << 30, 3_000
KINDS = ("loop", "trainer", "parts")
STEP = "step-00000003"
TENSORS = ("model.safetensors", "optimizer.safetensors", "rest.safetensors")


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


class Program:
    """A model in training, as it is built anew for each case."""

    def __init__(self):
        torch.manual_seed(0)
        self.run = Run(8, 4, 0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.step = self.run.train_step(self.model, optimizer, loss, scheduler=schedule)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(40, 4, generator=generator), torch.randint(2, (40,), generator=generator)
        self.loader = self.run.loader(data, shuffle=True)
        self.progress = Progress(self.run, self.step, None)
        self.contract = {**self.run.contract.as_json(), **step_contract(self.step), **loader_contract(self.loader)}

    def train(self, num_steps):
        for _, batch in zip(range(num_steps), self.loader, strict=False):
            self.step(batch)

    def rest(self):
        """Every sort of value that a state may have."""
        return {
            "numbers": [1, -(2**80), 0.5, float("nan"), float("-inf"), -0.0, True, None, np.float32(3)],
            "texts": ("a", "größe", {"b": 1, "$c": 2}, {3: 4, (5,): 6}),
            "arrays": [np.arange(6.0).reshape(2, 3), np.array([True]), np.ones(2, np.complex128)],
            "tensors": [torch.arange(6).view(2, 3).t(), torch.ones(2, dtype=torch.bool)],
            "others": [OrderedDict(a=1), Counter("aab"), torch.ones(2, dtype=torch.complex128)],
        }

    def save(self, kind, folder):
        """Writes a checkpoint: by the loop's own call, as `Trainer` does, or in part files of two ranks."""
        if kind == "loop":
            self.run.save_checkpoint(folder, self.step, self.loader, self.rest())
            return
        if kind == "trainer":
            state = self.progress.capture(self.loader, self.loader.state_dict(), self.contract)
        else:
            state = capture(self.step, {"contract": self.contract, "cursor": self.loader.state_dict(), "rest": [1.5]})
        with ExitStack() as until:
            self.write(kind, folder, state, begin_checkpoint(until, folder, 3, False))

    def write(self, kind, folder, state, temporary):
        written, whole = {}, state.files
        if kind == "parts":
            rows = {f: {n: t for n, t in ts.items() if t.ndim and f != "rest"} for f, ts in whole.items()}
            whole = {f: {n: t for n, t in ts.items() if n not in rows[f]} for f, ts in whole.items()}
            for file, rank in ((file, rank) for file in rows if rows[file] for rank in range(2)):
                shardings = {name: by_rows(tensor.shape, 2) for name, tensor in rows[file].items()}
                own = {
                    name: LocalShard(sharding.part(rows[file][name], rank), sharding)
                    for name, sharding in shardings.items()
                }
                written[part_name(file, rank, 2)] = write_part(temporary / part_name(file, rank, 2), own, rank)
        complete_checkpoint(folder, Snapshot(3, whole, state.facts), temporary, written, 3, False)

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
        ours = generator_states(torch.device("cpu"))
        for now, state in zip(ours["torch"], there["generators"]["torch"], strict=False):
            generator = torch.Generator()  # which leaves out what it does not use
            generator.set_state(state)
            yield now, generator.get_state()
        yield ours["python"], there["generators"]["python"]
        yield ours["numpy"], there["generators"]["numpy"]
        if kind == "trainer":
            state = self.progress.capture(self.loader, None, self.contract)
            for name in ("history", "epoch"):
                yield unpack(state.facts["run"], state.files["rest"])["rest"][name], there["rest"][name]
        else:
            yield rest, there["rest"]["rest"] if there["rest"]["rest"] is not None else {}

    def go_on(self):
        """Uses what was loaded: whatever it is, the process lives."""
        for use in (lambda: self.train(1), np.random.normal, random.random, lambda: torch.randn(3)):
            with suppress(Exception):
                use()


def text_of(value):
    """A value as text that tells its types and bits."""
    packed = pack(value, "")
    bits = {name: t.contiguous().reshape(-1).view(torch.uint8).tolist() for name, t in sorted(packed.tensors.items())}
    return json.dumps([packed.facts, bits], sort_keys=True)


def content_of(path):
    """All that a good checkpoint says."""
    snapshot = read_checkpoint(path)
    files = {name: dict(sorted(tensors.items())) for name, tensors in sorted(snapshot.files.items())}
    return text_of(files), json.dumps(snapshot.facts, sort_keys=True), snapshot.step


# The mutations: each changes the files in a folder by a generator of random numbers.

TEXTS = [*(b"", b"null", b"[]", b"{}", b"{", b'"\xff"', b"\xef\xbb\xbf{}", b"0", b"NaN", b"9" * 5000, b"-1e999")]
TEXTS += [b"[" * 200_000, b"[" * 500 + b"]" * 500, b'{"a":' * 300 + b"1" + b"}" * 300, b'"\\ud800"', b'{"format": 1}']
MAD = [None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**4000, 0.5, -1.0, 1e308, float("inf"), float("nan")]
MAD += [*("", "x", "\0", "\ud800", "$", "../x", "a" * 5000, "O", "torch", "float32", "F32", "BOOL", "<f8", "cpu")]
MAD += [[], {}, [[]], [None] * 50, {"": 0}, {"x": {"y": []}}, {"$": 1}, {"$new": []}, [0, 2**62], [-1, -1]]
MAD += [{"$scalar": "x"}, {"$scalar": {"$tensor": "x"}}, {"$array": [[1]]}, {"$array": {"$tuple": []}}]
MAD += [{"$float": "00"}, {"$float": "1e400"}, {"$float": [1]}, {"$tuple": "abc"}, {"$tuple": [1], "more": 1}]
MAD += [{"$dict": ["ab"]}, {"$dict": [[{"$dict": []}, 1]]}, {"$dict": [[{"$tensor": "x"}, 1]]}, {"$dict": [["a", 1]]}]
MAD += [{"$ordered_dict": [], "metadata": 3}, {"$dict": [], "metadata": {}}, {"$counter": [[1, "x"]]}]
STRIDES = ([10**12], [2**62, 1], [0, 0], [-1], [1, 1], "ab", [1.0, 1.0], [1, 6], [True])


def places(value):
    """All (container, key) of a tree of JSON."""
    found = []
    level = [value]
    while level:
        above = level.pop()
        for key in above if isinstance(above, dict) else range(len(above)):
            found.append((above, key))
            if isinstance(above[key], dict | list):
                level.append(above[key])
    return found


def mutate_tree(rng, tree, names=()):
    """Changes, in place, one thing or a few in a tree of JSON."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        found = places(tree)
        if not found:
            return
        above, key = rng.choice(found)
        how = rng.randrange(10)
        if how < 4:
            above[key] = copy.deepcopy(rng.choice(MAD))
        elif how == 4:
            del above[key]
        elif how == 5:
            other, name = rng.choice(found)
            above[key] = copy.deepcopy(other[name]) if name in other or not isinstance(other, dict) else None
        elif how == 6 and isinstance(above, dict):
            above[rng.choice(("$x", "a\0", "\ud800", "parameter", "stride", "requires_grad", "fused"))] = above.pop(key)
        elif how == 7:
            above[key] = rng.choice(
                ([above[key]], {"a": above[key]}, {"$tuple": [above[key]]}, {"$scalar": above[key]})
            )
        elif how == 8 and names:
            of = {"$tensor": rng.choice(names)}
            of |= rng.choice(({}, {"stride": rng.choice(STRIDES)}, {"dtype": rng.choice(("float64", "bool", "nn", 3))}))
            of |= rng.choice(({}, {"parameter": rng.choice((True, "x"))}, {"requires_grad": rng.choice((True, []))}))
            kinds = {rng.choice(("$array", "$scalar")): of}
            above[key] = rng.choice((of, kinds))
        elif isinstance(above[key], bool | int | float):
            above[key] = rng.choice((-above[key], above[key] + 1, not above[key], str(above[key]), above[key] * 2**60))


def as_text(tree):
    return json.dumps(tree, separators=(",", ":")).encode()


def facts(rng, folder):
    path = folder / "state.json"
    if rng.randrange(4) == 0:
        path.write_bytes(rng.choice(TEXTS))
    else:
        tree = json.loads(path.read_bytes())
        run = tree["run"]
        # The large trees of generators would take most of the changes of the whole.
        branches = [tree, tree, *[tree["optimizers"], run, run["rest"], run["steps"], run["settings"]] * 2]
        names = ["optimizer.0.state.0.exp_avg", *(name for file in TENSORS for name in header(folder / file)[0])]
        mutate_tree(rng, rng.choice(branches), names)
        path.write_bytes(as_text(tree))
    seal(folder, path.name)


def pointed(rng, folder):
    """Changes at places from where memory is reached."""
    path = folder / "state.json"
    tree = json.loads(path.read_bytes())
    generators, groups = tree["run"]["generators"], tree["optimizers"][0]["param_groups"]
    how = rng.randrange(4)
    if how == 0:
        generators["numpy"]["state"]["pos"] = rng.choice((10**9, -1, 625, 624, 0, 2**40, None, "1", 3.0))
    elif how == 1:
        for group in groups:
            group[rng.choice(("fused", "foreach", "capturable"))] = True
        kept, data = header(folder / "optimizer.safetensors")
        shrunk = next((name for name in kept if kept[name]["shape"] and rng.random() < 0.5), None)
        if shrunk:
            kept[shrunk]["shape"] = rng.choice(([1] * 40, [*kept[shrunk]["shape"], 1], kept[shrunk]["shape"][::-1]))
        write_header(folder / "optimizer.safetensors", kept, data)
        seal(folder, "optimizer.safetensors")
    elif how == 2:
        tree["run"]["rest"][rng.choice(("rest", "epoch", "history"))] = copy.deepcopy(rng.choice(MAD))
    else:
        mutate_tree(rng, generators["python"])
    path.write_bytes(as_text(tree))
    seal(folder, path.name)


def header(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(path, tree, data):
    text = as_text(tree)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensors(rng, folder):
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    how = rng.randrange(8)
    tree, data = header(path)
    if how == 0:
        path.write_bytes(rng.randbytes(rng.choice((0, 7, 8, 9, 100))))
    elif how == 1:
        size = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data)))
        path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    elif how == 2:
        whole = path.read_bytes()
        path.write_bytes(whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else whole + rng.randbytes(9))
    elif how == 3:
        path.write_bytes(len(text := rng.choice(TEXTS)).to_bytes(8, "little") + text + data)
    elif how == 4 and data:
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        write_header(path, tree, bytes(changed))
    elif how == 5 and len(tree) > 1:
        one, other = rng.sample(sorted(tree), 2)
        tree[one], tree[other] = tree[other], tree[one]
        write_header(path, tree, data)
    elif how == 6 and "__metadata__" in tree:
        info = json.loads(tree["__metadata__"]["DCP_SHARDING_INFO"])
        mutate_tree(rng, info)
        tree["__metadata__"]["DCP_SHARDING_INFO"] = rng.choice((json.dumps(info), json.dumps(info), "[" * 100_000))
        write_header(path, tree, data)
    else:
        mutate_tree(rng, tree)
        write_header(path, tree, data)
    seal(folder, path.name)


def listing(rng, folder):
    """Changes of the manifest, which is sealed by itself."""
    tree = json.loads((folder / MANIFEST_FILE).read_bytes())
    del tree["checksum"]
    name = rng.choice(sorted(tree["files"]))
    how = rng.randrange(6)
    if how == 0:
        written = tree["files"].pop(name)
        tree["files"][
            rng.choice(("a\0b.safetensors", "../x", "", ".", "..", "/dev/zero", "\ud800", "é" * 200, "\x1b", STEP))
        ] = written
    elif how == 1:
        tree["files"][name]["size"] = rng.choice((0, -1, 2**63, 10**30, 1.5, float("inf"), None, "7", True))
    elif how == 2:
        del tree["files"][name]
    elif how == 3:
        tree[rng.choice(("step", "version", "format", "files"))] = copy.deepcopy(rng.choice(MAD))
    elif how == 4:
        seal_text(folder, rng.choice(TEXTS))
        return
    else:
        mutate_tree(rng, tree)
    seal_text(folder, json.dumps(tree).encode())


def seal(folder, name):
    """Has the manifest list a file as it is now."""
    manifest, data = read_manifest(folder), (folder / name).read_bytes()
    written = Written(len(data), hashlib.sha256(data).hexdigest())
    whole = Manifest(manifest.step, {**manifest.files, name: written})
    (folder / MANIFEST_FILE).write_bytes(manifest_bytes(whole))


def seal_text(folder, text):
    """Writes a manifest of any text with the checksum that it has to have."""
    head = text.rstrip().removesuffix(b"}") + b',\n  "checksum": "'
    (folder / MANIFEST_FILE).write_bytes(head + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n')


MUTATIONS = (*[facts] * 6, *[pointed] * 2, *[tensors] * 3, listing)


def make_bases(folder):
    """A checkpoint of each kind, whole."""
    for kind in KINDS:
        program = Program()
        program.train(3)
        program.save(kind, folder / kind)


def outcome_of(number, seed, bases, folder, contents):
    """Mutates a checkpoint and loads it."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(KINDS)
    path = folder / STEP
    shutil.copytree(bases / kind / STEP, path)
    chosen = rng.choices(MUTATIONS, k=rng.choice((1, 1, 1, 2)))
    for mutate in chosen:
        with suppress(ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
            mutate(rng, path)  # the first one may have left nothing that the second knows
    program = Program()
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(None):
            loaded = list(program.load(kind, path))
        content = content_of(path)
    except SamestepError as error:
        return "refused" if len(str(error)) < LONGEST else f"deviation: a message of {len(str(error))} characters"
    finally:
        signal.alarm(0)
        shutil.rmtree(path)
    for now, there in loaded:
        assert text_of(now) == text_of(there), (now, there)
    program.go_on()
    return "same" if content == contents[kind] else "other"


def main(folder, seed, first, count):
    torch.set_num_threads(1)
    bases, scratch = Path(folder) / "bases", Path(folder) / f"cases-{first}"
    scratch.mkdir()
    contents = {kind: content_of(bases / kind / STEP) for kind in KINDS}
    limit = psutil.Process().memory_info().vms + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(first, first + count):
        try:
            outcome = outcome_of(number, seed, bases, scratch, contents)
        except Exception:
            traceback.print_exc()
            outcome = "deviation"
        print(number, outcome, flush=True)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
