"""Small scripts about files, seeds and output, for the ranks of a world: this file counts as the user's own."""

import csv
import glob
import gzip
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
import zipfile
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import torch

from samestep.patch import applied
from samestep.scripts import output, seeding
from samestep.scripts.files import patches as file_patches
from samestep.scripts.shared_script import SharedScript

LIBRARY = """
import glob, os, pathlib, shutil, tempfile, time, urllib.request, torch, threading, numpy, random

def write(path, text, mode="w"):
    with open(path, mode) as file:
        file.write(text)

def read(path):
    with open(path) as file:
        return file.read()

def save(path, values):
    numpy.save(path, values)

def make(path):
    os.makedirs(path)

def exists(path):
    return os.path.exists(path)

def listed(folder, text):
    os.makedirs(folder)
    found = os.path.isdir(folder), os.listdir(folder)
    with open(folder + "/file", "w") as file:
        file.write(text)
    return found

def changed(folder, text):
    os.remove(folder + "/state")
    found = [os.path.exists(folder + "/state")]
    with open(folder + "/file", "w") as file:
        file.write(text)
    found += [os.path.isfile(folder + "/file"), pathlib.Path(folder, "file").exists()]
    paths = [*pathlib.Path(folder).iterdir()]
    found += [os.listdir(folder), [path.name for path in paths], len(glob.glob(folder + "/f*"))]
    os.makedirs(folder + "/old")
    with open(folder + "/old/file", "w") as file:
        file.write(text)
    shutil.rmtree(folder + "/old")
    return *found, os.path.exists(folder + "/old/file"), os.path.getsize(folder + "/file")

def copy(source, target):
    shutil.copytree(source, target)

def moved(folder, text):
    os.makedirs(folder + "/new")
    with open(folder + "/new/file", "w") as file:
        file.write(text)
    shutil.move(folder + "/new", folder + "/moved")
    shutil.copytree(folder + "/moved", folder + "/copied")
    return read(folder + "/copied/file"), read(folder + "/moved/file")

def replace(path, text):
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    return file.name

def own_folder():
    folder = tempfile.mkdtemp()
    with open(folder + "/own.txt", "w") as file:
        file.write("own")
    with open(folder + "/own.txt") as file:
        text = file.read()
    shutil.rmtree(folder)
    return folder, text, os.path.exists(folder)

def fetch(url, path):
    return urllib.request.urlretrieve(url, path)[0]

def fetch_with_hub(url, path):
    torch.hub.download_url_to_file(url, path, progress=False)

def load_from_hub(url, folder):
    return torch.hub.load_state_dict_from_url(url, folder, progress=False)

def seed_everything(seed):
    random.seed(seed); numpy.random.seed(seed); torch.manual_seed(seed)
"""


def library():
    """Functions that count as a library's: their code has no file of the user's."""
    names = {}
    exec(LIBRARY, names)
    return names


def in_script(communicator, name, *args):
    """Runs a function of this file, by name, under the patches of `files`."""
    with applied(file_patches.patches(SharedScript(communicator))):
        return globals()[name](communicator, *args)


def bare(communicator, name, *args):
    """Runs it without any patch."""
    return globals()[name](communicator, *args)


def caught(function, *args, **kwargs):
    """The name and text of what a call raises; None if it returns."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


def writes(communicator, folder):
    """Writes in many ways: always this rank, and once more for each rank that appends."""
    text, folder = f"rank {communicator.rank}", Path(folder)
    with open(folder / "plain.txt", "w") as file:
        print(text, file=file)
    with open(folder / "plain.txt", "a") as file:
        position = file.tell()
        file.write(text + "\n")
    with io.open(folder / "binary", "wb", buffering=0) as file:  # noqa: UP020 - another name of it
        file.write(text.encode())
    (folder / "path.txt").write_text(text)
    (folder / "touched").touch()
    with (folder / "data.json").open("x") as file:
        json.dump(text, file)
    with open(folder / "data.pickle", "wb") as file:
        pickle.dump(text, file)
    with open(folder / "data.csv", "w", newline="") as file:
        csv.writer(file).writerow([text])
    with gzip.open(folder / "text.gz", "at") as file:
        file.write(text)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("member", text)
    with tarfile.open(folder / "archive.tar", "w") as archive:
        archive.add(folder / "path.txt", "member")
    descriptor = os.open(folder / "low", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, text.encode())
    os.close(descriptor)
    np.save(folder / "array", np.full(2, communicator.rank))
    np.savez(folder / "arrays.npz", a=np.full(2, communicator.rank))
    np.savetxt(folder / "array.txt", np.full(2, communicator.rank))
    np.full(2, communicator.rank).tofile(folder / "array.raw")
    torch.save({"rank": communicator.rank}, folder / "model.pt")
    torch.save({"rank": communicator.rank}, str(folder / "old.pt"), _use_new_zipfile_serialization=False)
    os.makedirs(folder / "a" / "b")
    shutil.copy(folder / "path.txt", folder / "a" / "copy.txt")
    shutil.copytree(folder / "a", folder / "c")
    os.rename(folder / "c", folder / "d")
    os.remove(folder / "touched")
    shutil.rmtree(folder / "a")
    buffer = io.BytesIO()
    torch.save(communicator.rank, buffer)
    return position, len(buffer.getvalue())


def outcomes(communicator, folder):
    """Calls that raise, and calls that do not."""
    folder = Path(folder)
    (folder / "there").mkdir()
    (folder / "file").write_text("x")
    fails = [
        caught(os.makedirs, folder / "there"),
        caught((folder / "there").mkdir),
        caught(open, folder / "file", "x"),
        caught(open, folder / "missing" / "file", "w"),
        caught(open, folder / "there", "w"),
        caught(os.remove, folder / "missing"),
        caught((folder / "missing").unlink),
        caught(os.rmdir, folder),
        caught(os.listdir, folder / "missing"),
        caught(os.path.getsize, folder / "missing"),
        caught(shutil.rmtree, folder / "missing"),
        caught(torch.save, 1, folder / "missing" / "model.pt"),
        caught(torch.save, lambda: 1, folder / "unpicklable.pt"),
        caught(open, folder / "missing", "r+"),
        caught(subprocess.check_call, ["false"]),
        caught(subprocess.run, ["no-such-program-here"]),
    ]
    works = [
        caught(os.makedirs, folder / "there", exist_ok=True),
        caught((folder / "p" / "q").mkdir, parents=True, exist_ok=True),
        caught((folder / "p" / "q").mkdir, parents=True, exist_ok=True),
        caught((folder / "missing").unlink, missing_ok=True),
        caught(shutil.rmtree, folder / "missing", ignore_errors=True),
    ]
    return fails, works


def late_writer(communicator, folder):
    """Rank 0 is slow; all ranks read at once. The names differ."""
    path, library_path = Path(folder, f"at-{communicator.rank}.txt"), f"{folder}/lib-{communicator.rank}.txt"
    if communicator.rank == 0:
        time.sleep(0.3)
    with open(path, "w") as file:
        file.write("written")
    library()["write"](library_path, "by a library")
    torch.save(torch.ones(2), f"{folder}/{communicator.rank}.pt")
    np.save(f"{folder}/{communicator.rank}", np.ones(2))
    os.makedirs(f"{folder}/run-{communicator.rank}")
    Path(folder, f"run-{communicator.rank}", "note").write_text("noted")
    before = os.getcwd()
    os.chdir(f"{folder}/run-{communicator.rank}")
    os.chdir(before)
    return [
        path.read_text(),
        library()["read"](library_path),
        float(torch.load(f"{folder}/{communicator.rank}.pt").sum()),
        float(torch.load(f=f"{folder}/{communicator.rank}.pt", mmap=True).sum()),
        float(np.load(f"{folder}/{communicator.rank}.npy").sum()),
        Path(folder, f"run-{communicator.rank}", "note").read_text(),
    ]


def overwritten(communicator, folder):
    """Reads a file, slowly on ranks above 0, and overwrites it, three times."""
    read = []
    for round_ in range(3):
        if communicator.rank:
            time.sleep(0.1)
        read.append(Path(folder, "state").read_text())
        Path(folder, "state").write_text(f"{round_}")
    if communicator.rank:
        time.sleep(0.1)
    with open(f"{folder}/state") as file:
        read.append(file.read())
    os.remove(f"{folder}/state")
    return read


def both_ways(communicator, folder):
    """Files for reading and writing."""
    path, found = f"{folder}/both", []
    for mode in ("w+", "r+", "a+"):
        with open(path, mode) as file:
            found.append(file.read())
            file.write(f"{mode} ")
            file.seek(0)
            found.append(file.read())
    array = np.memmap(f"{folder}/mapped", np.float32, "w+", shape=(3,))
    array[:] = communicator.rank + 1
    return found, array.tolist() == [communicator.rank + 1.0] * 3


def questions(communicator, folder):
    """Queries about a folder, by names that only rank 0 has, while rank 0 is slow."""
    if communicator.rank == 0:
        time.sleep(0.1)
    path, root = Path(folder, str(communicator.rank)), Path(folder)
    os.makedirs(root / "sub" / "skipped")
    (root / "sub" / "file").touch()
    walked = []
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "skipped"]
        walked.append((os.path.basename(where), sorted(names)))
    with os.scandir(root) as entries:
        scanned = [(entry.name, entry.is_dir()) for entry in entries]
    return [
        (os.path.exists(path), path.exists(), os.path.isfile(path), path.is_file(), path.is_dir(), path.stat().st_size),
        (os.path.getsize(path), os.path.getmtime(path), os.access(path, os.R_OK)),
        (os.listdir(root), glob.glob(f"{folder}/*"), list(glob.iglob(f"{folder}/*"))),
        (list(root.iterdir()), list(root.glob("*")), list(root.rglob("*"))),
        (walked, scanned),
    ]


def threads_of_its_own(communicator, folder):
    """Whether a rank that walks through its own threads, of which each process has others, finds them."""
    return next(os.walk(top="/proc/self/task"))[1] == os.listdir("/proc/self/task")


def many_questions(communicator, folder):
    """A line that asks very often: how many answers were rank 0's."""
    path = Path(folder, str(communicator.rank))
    return sum(os.path.exists(path) for _ in range(1000))


def temporary(communicator, folder):
    """Temporary files and folders of the script and of a library."""
    made = tempfile.mkdtemp(dir=folder)
    Path(made, "a").write_text("a")
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        Path(inner, "b").write_text("b")
        read = Path(inner, "b").read_text()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=folder) as file:
        file.write("named")
        file.flush()
        named = Path(file.name).read_text()
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.write(descriptor, b"low")
    os.close(descriptor)
    with tempfile.TemporaryFile() as file:
        file.write(b"nameless")
        file.seek(0)
        nameless = file.read()
    own = library()["own_folder"]()
    return (made, inner, read, named, path, Path(path).read_text(), nameless), own


def by_library(communicator, folder):
    """A library that puts a file of its own in place, and copies a folder, of which something is read."""
    left = library()["replace"](f"{folder}/placed", f"rank {communicator.rank}")
    os.makedirs(f"{folder}/source")
    Path(folder, "source", "file").write_text(f"rank {communicator.rank}")
    library()["copy"](f"{folder}/source", f"{folder}/target")
    communicator.barrier()
    return Path(folder, "placed").read_text(), Path(left).exists(), Path(folder, "target", "file").read_text()


def listed_by_library(communicator, folder):
    """A library that makes a folder, lists it and writes into it, on rank 0 later than on the others."""
    if communicator.rank == 0:
        communicator.barrier()
    found = library()["listed"](f"{folder}/made", f"rank {communicator.rank}")
    if communicator.rank > 0:
        communicator.barrier()
    return found, Path(folder, "made", "file").read_text()


def changed_by_library(communicator, folder):
    """A library that removes and writes files and asks for them, on rank 0 later than on the others."""
    time.sleep(0.3 * (communicator.rank == 0))
    return library()["changed"](folder, "text")


def in_a_folder_moved_by_library(communicator, folder):
    """A library that moves a folder into place, on rank 0 later than on the others, and reads a file in it."""
    time.sleep(0.3 * (communicator.rank == 0))
    return library()["moved"](folder, "text")


def appended_and_read(communicator, folder):
    """A log that stays open: rank 0 is late to append, and it is read after each line."""
    read = []
    with open(f"{folder}/log", "a", buffering=1) as log:
        for line in range(3):
            time.sleep(0.2 * (communicator.rank == 0))
            log.write(f"{line}")
            log.flush()
            read.append(Path(folder, "log").read_text())
    return read


def saved_on_a_thread(communicator, folder):
    """A thread that saves, on rank 0 later than on the others; it is joined, and what it saved is loaded."""

    def save():
        time.sleep(0.3 * (communicator.rank == 0))
        torch.save(torch.ones(2), f"{folder}/late.pt.tmp")
        os.replace(f"{folder}/late.pt.tmp", f"{folder}/late.pt")

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    return library()["exists"](f"{folder}/late.pt"), float(torch.load(f"{folder}/late.pt").sum())


def saved_again_by_library(communicator, folder):
    """A library that overwrites what is read twice, slowly on ranks above 0."""
    read = []
    for number in range(2):
        library()["save"](f"{folder}/saved.npy", number)
        for _ in range(2):
            time.sleep(0.2 * (communicator.rank > 0))
            read.append(int(np.load(f"{folder}/saved.npy")))
    return read


def commands(communicator, folder):
    """Programs."""
    run = subprocess.run(f"echo once >> {folder}/log; echo said", shell=True, capture_output=True, text=True)
    code = os.system(f"echo once >> {folder}/log; exit 3")
    return run.returncode, run.stdout, os.waitstatus_to_exitcode(code), subprocess.getoutput("echo $PPID")


def piped(communicator, folder):
    """Programs whose output is read as a stream, and one that runs until the end, unread."""
    with os.popen(f"echo once >> {folder}/log; echo one; echo two; echo $PPID") as stream:
        lines = stream.readlines()
    os.popen(f"while [ ! -e {folder}/end ]; do sleep 0.02; done")
    failed = os.popen("exit 3")
    said = lines, list(os.popen("echo a; echo b")), os.popen("echo read").read(), failed.close()
    Path(folder, "end").touch()
    return said


def hdf5(communicator, folder):
    """Files of h5py, for writing and for reading them back; every rank would write its own number."""
    import h5py

    path, found = f"{folder}/data.h5", []
    with h5py.File(path, "w") as file:
        file["a"] = np.full(3, communicator.rank)
        found.append(file["a"][:].tolist())
    for mode in ("r+", "a"):
        with h5py.File(path, mode) as file:
            found.append(file["a"][:].tolist())
            file["a"][0] = communicator.rank + len(found)
            file[f"mode {mode}"] = 1.0
    with h5py.File(path) as file:
        found.append([file["a"][:].tolist(), sorted(file)])
    return found, caught(h5py.File, f"{folder}/missing.h5", "r+"), caught(h5py.File, path, "x")


def asked(communicator, folder):
    """A person."""
    sys.stdin, before = (io.StringIO("yes\n") if communicator.rank == 0 else io.StringIO()), sys.stdin
    try:
        return input()
    finally:
        sys.stdin = before


def elsewhere(communicator, folder):
    """Writes where the ranks cannot meet: another thread, a worker process, a library, a chunk."""
    text = f"rank {communicator.rank}\n"

    def append(name):
        with open(f"{folder}/{name}", "a") as file:
            file.write(text)
        os.makedirs(f"{folder}/{name}-folder")

    thread = threading.Thread(target=append, args=("thread",))
    thread.start()
    thread.join()
    worker = multiprocessing.get_context("fork").Process(target=append, args=("worker",))
    worker.start()
    worker.join()
    append("script")
    library()["write"](f"{folder}/library", text, "a")
    library()["make"](f"{folder}/library-folder")
    handler = logging.FileHandler(f"{folder}/logging")
    handler.emit(logging.makeLogRecord({"msg": text.strip()}))
    handler.close()
    return worker.exitcode


def in_a_chunk(communicator, folder):
    """Writes while a chunk of a wrapped forward runs."""
    script = SharedScript(communicator)
    with applied(file_patches.patches(script)):
        for chunk in range(communicator.rank + 1):  # not equally many
            with script.chunk(chunk), open(f"{folder}/log", "a") as file:
                file.write(f"rank {communicator.rank}\n")
                os.path.exists(f"{folder}/log")
    return


def saves_and_loads(communicator, folder):
    """Libraries that are imported late."""
    before, path = list(sys.meta_path), list(sys.path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("safetensors", "torchvision")]:
        del sys.modules[name]
    with applied(file_patches.patches(SharedScript(communicator))):
        importlib.util.find_spec("safetensors.torch")  # looks, and imports nothing
        from safetensors.torch import load_file, save_file

        name = f"{folder}/{communicator.rank}.safetensors"
        save_file({"rank": torch.full((2,), communicator.rank)}, name)
        loaded = load_file(name)["rank"].tolist()
        sys.path.insert(0, folder)
        try:
            from torchvision.datasets import Digits

            script = Digits(f"{folder}/data", download=True).text
            by_library = {}
            exec(f"from torchvision.datasets import Digits\ntext = Digits({folder!r} + '/more', True).text", by_library)
        finally:
            sys.path[:] = path
    undone = not hasattr(Digits.__init__, "__wrapped__"), not hasattr(save_file, "__wrapped__")
    left = sys.modules["safetensors.torch"].save_file
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return loaded, script, by_library["text"], undone[0], hasattr(left, "__wrapped__"), sys.meta_path == before


def downloads(communicator, folder, url):
    """The same files, fetched by the script and by libraries, with ranks that come late or early."""
    fetched = urllib.request.urlretrieve(f"{url}/script", f"{folder}/script")
    torch.hub.download_url_to_file(f"{url}/hub", f"{folder}/hub", progress=False)
    if communicator.rank == 0:
        time.sleep(0.2)
    library()["fetch"](f"{url}/library", f"{folder}/library")
    text = Path(f"{folder}/library").read_text()
    if communicator.rank == 1:
        time.sleep(0.2)
    if not os.path.isfile(f"{folder}/late"):
        library()["fetch_with_hub"](f"{url}/late", f"{folder}/late")
    state = library()["load_from_hub"](f"{url}/model.pt", f"{folder}/models")
    return fetched[1].get("X-Kind"), text, Path(f"{folder}/late").read_text(), state["w"].tolist()


def skips_a_fetch(communicator, folder, url):
    """Rank 0 has fetched when the others look, and these do not ask any more."""
    if communicator.rank == 0:
        library()["fetch"](f"{url}/only", f"{folder}/only")
    communicator.barrier()
    return Path(f"{folder}/only").read_text()


def _draws():
    return torch.rand(1).item(), np.random.rand(), random.random()


def draws(communicator):
    """The next draws of the generators, whose states are restored."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    found = _draws()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    return found


def seeds(communicator, seed):
    """Draws after the start, and after seeds that differ between processes."""
    script = SharedScript(communicator)
    with applied(seeding.patches(script)), seeding.seeded(script, seed):
        found = [_draws()]
        for given in (lambda: communicator.rank, lambda: time.time_ns() % 2**31):
            torch.manual_seed(given())
            np.random.seed(given())
            random.seed(given())
            found.append(_draws())
        torch.seed()
        np.random.seed()
        random.seed()
        found.append(_draws())
        random.seed(None)
        np.random.seed(None)
        torch.random.seed()
        found.append(_draws())
        found.append((np.random.default_rng().random(), random.Random().random()))
        found.append((np.random.default_rng(None).random(), random.Random(None).random()))
    return found


def states(communicator):
    """States that are restored: those of rank 0."""
    script = SharedScript(communicator)
    with applied(seeding.patches(script)), seeding.seeded(script, 1):
        generator = np.random.RandomState(communicator.rank)
        np.random.set_state(generator.get_state())
        random.setstate(random.Random(communicator.rank).getstate())
        torch.set_rng_state(torch.Generator().manual_seed(communicator.rank).get_state())
        return _draws()


def unpatched_seeds(communicator):
    """The same without any patch, for the twin."""
    with seeding.seeded(SharedScript(communicator), 1):
        np.random.seed(communicator.rank)
        return np.random.rand(), np.random.default_rng().random()


def forwards_since(communicator):
    """How many forwards count after each call that seeds torch, and each that does not."""
    script, counts = SharedScript(communicator), {}
    with applied(seeding.patches(script)), seeding.seeded(script, 1):
        for name, call in {
            "torch.manual_seed": lambda: torch.manual_seed(1),
            "torch.random.manual_seed": lambda: torch.random.manual_seed(1),
            "torch.seed": torch.seed,
            "torch.cuda.manual_seed_all": lambda: torch.cuda.manual_seed_all(1),
            "random.seed": lambda: random.seed(1),
            "np.random.seed": lambda: np.random.seed(1),
        }.items():
            script.num_since_reseed = 5
            call()
            counts[name] = script.num_since_reseed
    return counts


def said_seeds(communicator, how):
    """The output on stderr of a script that seeds and draws in one of these ways."""
    script, stderr = SharedScript(communicator), io.StringIO()
    seed = 7 if how == "given" else None
    with redirect_stderr(stderr), applied(seeding.patches(script)), seeding.seeded(script, seed):
        if how in ("torch alone", "as the run"):
            torch.manual_seed(0)
        if how == "library":
            library()["seed_everything"](3)
        if how == "restored":
            torch.set_rng_state(torch.get_rng_state())
        if how in ("too late", "restored", "as the run"):
            torch.rand(1)
            torch.manual_seed(3)
        if how == "by chance":
            torch.seed()
            np.random.default_rng()
        if how in ("draws", "torch alone", "given"):
            _draws()
    return stderr.getvalue()


def in_chunks(communicator):
    """Generators that are made inside of chunks, whose seeds are the same on all ranks; no rank waits."""
    script, found = SharedScript(communicator), []
    with applied(seeding.patches(script)), seeding.seeded(script, 1):
        for chunk in range(communicator.rank + 1):
            with script.chunk(chunk):
                random.seed(9)
                torch.manual_seed(9)
                found.append((np.random.default_rng().random(), random.Random().random(), torch.rand(1).item()))
    return found


def streams(communicator):
    """The output in a chunk of a handler that was set up before it."""
    script = SharedScript(communicator)
    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = stdout, stderr
    try:
        with output.script_streams(script):
            handler = logging.StreamHandler()
            print("before")
            with output.captured() as said:
                print("inside", communicator.rank)
                handler.emit(logging.makeLogRecord({"msg": "logged"}))
            middle = stdout.getvalue()
            for rank, part in enumerate([said] * communicator.world_size):
                if rank == communicator.rank == 0:
                    output.replay(part)
        restored = (sys.stdout, sys.stderr) == (stdout, stderr)
    finally:
        sys.stdout, sys.stderr = before
    return said, middle, stdout.getvalue(), stderr.getvalue(), restored
