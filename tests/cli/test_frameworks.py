"""Scripts of the frameworks, as their documentation writes them: four ranks give the same bits on 1 to 4 devices.

They are in `frameworks/`, on scanned digits and texts that come with scikit-learn. FSDP on whole numbers, whose sums
are exact in every order, must end in the bits that torchrun gives with four processes, too.
"""

import hashlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import gpus
import pytest
import torch
from cli_commands import samestep
from safetensors.torch import load

PROGRAMS = Path(__file__).parent / "frameworks"
OTHERS = {"accelerate": PROGRAMS.parents[2] / "examples" / "ddp_accelerate.py"}
SCRIPTS = {
    "accelerate": ("--epochs", "2", "--save", "net.pt"),
    "trainer": (),
    "lightning": (),
    "fabric": (),
    "ddp": ("hook", "power_sgd", "zero"),
    "fsdp": (),
    "trl": (),
    "deepspeed": (),
}
PACKAGES = {"accelerate": ("accelerate",), "trainer": ("transformers", "datasets"), "trl": ("trl",)}
PACKAGES |= dict.fromkeys(("pretrained", "pretrained_alone"), ("transformers", "peft", "accelerate"))
PACKAGES |= dict.fromkeys(("lightning", "fabric"), ("lightning", "torchmetrics"))
PACKAGES |= {"deepspeed": ("deepspeed",)}  # not of the extra: it compiles its operator once, for three minutes
LONGER = ("trl", "trainer", "fabric", "deepspeed")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
# What samestep run sets.
AS_OURS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "ACCELERATE_USE_CPU": "true"}
CLOCKS = re.compile(r"""['"]?\w+_(runtime|per_second)['"]?: ['"]?[\d.e+-]+['"]?,?\s*""")
SAVED = {"pretrained": ("ddp", "lora", "merged", "fsdp", "accelerate"), "pretrained_alone": ("tuned", "lora", "merged")}
UNIQUE = (".metadata", "README.md")  # a checkpoint's identity; a page with versions


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def _need(name):
    for package in PACKAGES.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def _by_another(command, *program, cwd):
    """A program under torchrun or python; again if gloo's threads have ended it at torch's end."""
    for _ in range(3):
        done = samestep(*program, cwd=cwd, command=command, **AS_OURS)
        if "terminate called without an active exception" not in done.stderr:
            break
    return done


def _digest(path):
    content = path.read_bytes()
    if path.suffix in (".json", ".csv"):
        content = CLOCKS.sub("", content.decode()).encode()
    return hashlib.sha256(content).hexdigest()


def outcome(folder, name, arguments, devices, *options, command=TORCHRUN, read=_digest, **variables):
    """What four ranks print and save: on so many CPU workers, on GPUs ("0,1"), or under torchrun or python (None).

    Runs that are compared have the same folder, whose name may be in a checkpoint.
    """
    _need(name)
    folder = folder / "run"
    folder.mkdir()
    program = (OTHERS.get(name, PROGRAMS / f"with_{name}.py"), *arguments)
    if devices is None:
        done = _by_another(command, *program, cwd=folder)
    else:
        devices = f"cpu:{devices}" if isinstance(devices, int) else devices
        options = ("--logical-devices", 4, "--devices", devices, *options)
        done = samestep("run", *options, *program, cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    assert "trains on its own" not in done.stderr
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in UNIQUE]
    saved = {str(path.relative_to(folder)): read(path) for path in paths}
    assert saved
    shutil.rmtree(folder)
    return CLOCKS.sub("", done.stdout), saved


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """The outcome of a script on one device; each runs once, in the folder in which all its runs are."""
    known = {}

    def look_up(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = folder, outcome(folder, name, SCRIPTS[name], 1)
        return known[name]

    return look_up


@pytest.mark.parametrize("devices", [2, _slow(4)])
@pytest.mark.parametrize("name", [_slow(name) if name in LONGER else name for name in SCRIPTS])
def test_four_ranks_print_and_save_the_same_on_any_number_of_devices(on_one, name, devices):
    folder, (printed, saved) = on_one(name)
    also_printed, also_saved = outcome(folder, name, SCRIPTS[name], devices)
    assert also_printed == printed
    assert also_saved == saved


@pytest.mark.parametrize("name", ["accelerate", _slow("trainer")])
def test_as_scripts_for_one_process_they_are_shared_out_with_the_same_bits(tmp_path, name):
    options = ("--single-process", "--seed", "1")
    one, three = (outcome(tmp_path, name, SCRIPTS[name], devices, *options, **AS_OURS) for devices in (1, 3))
    assert one == three
    assert "4 processes" not in one[0]
    assert "processes 4" not in one[0]


def test_exact_sums_end_in_the_bits_of_torchrun_with_four_processes(tmp_path):
    # Neither finds GPUs, with which torch writes tensors in another order, and copies them to the host.
    ours, theirs = (outcome(tmp_path, "fsdp", ("exact",), devices, **AS_OURS) for devices in (2, None))
    assert ours == theirs


def test_a_real_device_in_a_seed_and_sums_device_by_device_are_found_out(tmp_path):
    twins = ("leak", "by_device")
    one, two = (outcome(tmp_path, "ddp", twins, count, NUM_DEVICES=str(count)) for count in (1, 2))
    assert one[1].keys() == two[1].keys() == {"leak.pt", "hook.pt"}
    assert all(one[1][path] != two[1][path] for path in one[1])


@pytest.mark.slow  # each rank imports transformers
@pytest.mark.parametrize(
    ("name", "variants", "command"),
    [
        ("pretrained", ("ddp", "lora", "fsdp", "accelerate", "leak"), TORCHRUN),
        ("pretrained_alone", (), (sys.executable,)),
    ],
)
def test_models_that_are_loaded_and_saved_by_their_library_have_the_same_bits(tmp_path, name, variants, command):
    options = {"command": command, "read": Path.read_bytes}
    one, *others, theirs = (outcome(tmp_path, name, variants, each, **options) for each in (1, 2, 3, None))
    for printed, saved in others:
        assert saved.keys() == one[1].keys() == theirs[1].keys()
        different = {Path(path).parts[0] for path in saved if saved[path] != one[1][path]}
        assert different == ({"leaked"} if variants else set()), "the twin alone"
        assert variants or printed == one[0]
    rounded = {path for path in theirs[1] if theirs[1][path] != one[1][path] and not path.startswith("leaked")}
    assert {Path(path).parts[0] for path in rounded} == {*SAVED[name]}, "what is trained is added in another order"
    for path in rounded:
        torch.testing.assert_close(load(one[1][path]), load(theirs[1][path]), rtol=1e-4, atol=1e-6)


@pytest.fixture
def ends(tmp_path):
    """`ends(devices, name, …)`: the last line of a script of two ranks, on so many CPUs or under torchrun (None).

    All runs have one folder, in which the checkpoints are.
    """

    def run(devices, name, *words):
        _need(name)
        program = PROGRAMS / ("with_deepspeed.py" if name == "deepspeed" else "with_resumed.py"), name, *words
        if devices is None:
            done = _by_another((*TORCHRUN[:-1], 2), *program, cwd=tmp_path)
        else:
            done = samestep("run", "--logical-devices", 2, "--devices", f"cpu:{devices}", *program, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate", "transformers", "deepspeed"])
def test_a_script_stopped_in_mid_epoch_and_resumed_on_fewer_devices_ends_in_the_bits_of_one_that_was_not(ends, name):
    whole, stopped = ends(2, name), ends(2, name, "stop")
    assert ends(1, name, "resume") == whole != stopped


@pytest.mark.slow
@pytest.mark.parametrize("words", [("accelerate", "careless"), ("transformers", "careless"), ("lightning",)])
def test_what_a_framework_does_not_restore_is_resumed_as_under_torchrun(ends, words):
    whole, _ = ends(2, *words), ends(2, *words, "stop")
    resumed = ends(1, *words, "resume")
    assert resumed != whole
    ends(None, *words, "stop")
    assert ends(None, *words, "resume") == resumed


@gpus.needs_fake_gpus
@pytest.mark.parametrize("name", [*map(_slow, ("fsdp", "accelerate", "trainer", "lightning"))])
def test_a_script_for_four_gpus_runs_on_two(tmp_path, name):
    runs = [outcome(tmp_path, name, SCRIPTS[name], each, **gpus.environment(4)) for each in ("0,1", "0,1,2,3")]
    assert runs[0] == runs[1]


@gpus.needs_fake_gpus
def test_sync_batch_norm_sees_the_batches_of_all_ranks(tmp_path):
    runs = [outcome(tmp_path, "ddp", ("sync_batch_norm",), each, **gpus.environment(4)) for each in ("0,", "1,3")]
    assert runs[0] == runs[1]
