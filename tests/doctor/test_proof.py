"""The proof of a machine: its rows, their judgement, and all of it over processes, on CPUs and on fake GPUs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpus
import pytest
from machines import CPU_TORCH, gpu, machine
from proof_worlds import shortened

from samestep.devices.selection import select
from samestep.doctor import proof
from samestep.doctor.check_table import good
from samestep.doctor.proof import (
    CHECKED,
    LATE,
    PLACED,
    UnprovenError,
    as_ledger,
    judge_bits,
    judge_collectives,
    judge_killed,
    judge_logical,
    judge_memory,
    judge_streams,
    judge_waits,
    make_rows,
)
from samestep.errors import RunFolderError, UsageError
from samestep.extras import is_installed

PROGRAM = Path(__file__).with_name("proof_worlds.py")


def rows_of(devices, inventory, quick=False):
    return make_rows(select(devices, inventory), inventory, quick, 60.0)


def gpus_of(row):
    return [device.index for device in row.selection.devices]


def test_four_gpus_are_proven_on_one_and_all_first_and_with_two_processes_on_one():
    rows = rows_of("auto", machine(*map(gpu, range(4))))
    assert {row.missing for row in rows if row.selection is None} <= {"needs CUDA devices, Triton and a C compiler"}
    bits = [row for row in rows if row.name.startswith("models")]
    assert [gpus_of(row) for row in bits] == [[0], [0, 1, 2, 3], [0, 1, 2], [0, 0], [0, 1]]
    shared = bits[3].selection
    assert shared.environment == bits[0].selection.environment  # both processes see this GPU alone
    assert [gpus_of(row) for row in rows if "fsdp2" in row.name] == [[0, 1, 2], [0, 1, 2, 3]]
    assert len({row.name for row in rows}) == len(rows)


def test_one_gpu_is_proven_with_two_processes_on_it():
    rows = {row.name: row for row in rows_of("auto", machine(gpu(0)))}
    missing = [name for name, row in rows.items() if row.selection is None]
    assert missing == [
        "out of memory in NCCL",
        *([] if is_installed("triton") else ["torch.compile", "torch.compile with CUDA graphs"]),
    ]
    for what in ("collectives", "a killed rank", "a stopped rank", "models and precisions"):
        assert gpus_of(rows[f"{what} on two processes on one GPU"]) == [0, 0]


def test_cpus_leave_out_the_rows_about_gpus_and_say_why():
    rows = rows_of("cpu:3", machine(torch=CPU_TORCH))
    missing = {row.name: row.missing for row in rows if row.selection is None}
    assert set(missing) == {
        "models and precisions on two processes on one GPU",
        "sums on the GPU and on the host",
        "out of memory in NCCL",
        "expandable segments",
        "stream sanitizer",
        "host waits",
        "host waits of a run that heals",
        "memory beside the parameters",
        "torch.compile",
        "torch.compile with CUDA graphs",
    }
    assert all("CUDA device" in why for why in missing.values())


def test_twenty_gpus_have_a_microbatch_each_and_no_row_for_each_number_of_them():
    rows = rows_of("auto", machine(*(replace(gpu(0), index=index, visible_as=str(index)) for index in range(20))), True)
    counts = [row.selection.count for row in rows if row.name.startswith("models")]
    assert counts == [1, 20, 3, 2, 2, 8]
    uneven = "microbatches that devices do not divide"
    assert {row.options["num_microbatches"] for row in rows if not row.name.startswith(uneven)} == {20}


def training(seed=0, losses=(2.0, 1.0, 0.5), digest=None):
    steps = [
        {"step": number, "num_samples": 8, "loss": float(loss).hex(), "digest": f"{seed}{number}"}
        for number, loss in enumerate(losses, 1)
    ]
    return {"steps": steps, "digest": digest or f"end {seed}"}


def known_of(**trainings):
    return {name: as_ledger(each) for name, each in trainings.items()}


def test_equal_bits_are_proven_and_the_first_step_that_differs_is_named():
    known = {}
    text, _ = judge_bits({"a": [training(1), training(1)], "b": [training(2)]}, known, is_first=True)
    assert text == "2 trainings of 3 steps: every time the same bits"
    assert judge_bits({"a": [training(1)]}, known)[0] == "1 training of 3 steps: the bits of one device"
    with pytest.raises(UnprovenError, match=r"b: expected loss 0x1.0000000000000p\+0 in step 2, got 0x1.8"):
        judge_bits({"b": [training(2, (2.0, 1.5, 0.5))]}, known)
    with pytest.raises(UnprovenError, match="b: expected final digest end 2 in step 3, got other"):
        judge_bits({"b": [training(2, digest="other")]}, known)
    with pytest.raises(UnprovenError, match="expected 3 steps, got 2"):
        judge_bits({"b": [training(2, (2.0, 1.0))]}, known)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"new": [training(1)]}, "none to compare with"),
        ({"a": [training(1, (2.0, float("nan")))]}, "finite losses, got nan in step 2"),
        ({"a": [training(1, (2.0,))]}, "the state to move"),
    ],
)
def test_equal_bits_of_trainings_that_are_broken_or_unknown_prove_nothing(facts, expected):
    with pytest.raises(UnprovenError, match=expected):
        judge_bits(facts, {} if "new" in facts else known_of(a=facts["a"][0]))


def test_trainings_that_all_end_alike_did_not_train():
    with pytest.raises(UnprovenError, match="did not train"):
        judge_bits({"a": [training(1)], "b": [training(1)]}, {}, is_first=True)


KILL, HEAL = {"event": "death"}, {"event": "heal", "seconds": 0.25}


def test_a_killed_rank_must_leave_the_undisturbed_bits():
    known = {LATE: as_ledger(training(1))}
    assert "went on after 0.25 s" in judge_killed({"events": [KILL, HEAL], "digest": "end 1"}, known)[0]
    assert judge_killed({"events": [], "digest": "end 1"}, known, heals=False)[0] == "it ended in the undisturbed bits"
    with pytest.raises(UnprovenError, match="expected a rank to die"):
        judge_killed({"events": [], "digest": "end 1"}, known)
    with pytest.raises(UnprovenError, match="expected the undisturbed digest end 1, got end 2"):
        judge_killed({"events": [KILL, HEAL], "digest": "end 2"}, known)


def test_a_run_for_which_nccl_finds_no_memory_must_end_with_that_error():
    said = "rank 1 on cuda:1 failed:\nOutOfMemoryError: out of memory: NCCL finds none on the GPU of rank 1 for its own"
    for each in (said, "rank 1 on cuda:1 failed:\nAcceleratorError: CUDA error: out of memory"):
        assert "all end, after 3 s" in proof.judge_starved({"failure": each, "seconds": 3.0}, {})[0]
    with pytest.raises(UnprovenError, match=r"that it finds no memory, got .*PeerLostError: rank 0 waits"):
        proof.judge_starved({"failure": "PeerLostError: rank 0 waits for rank 1", "seconds": 3.0}, {})
    with pytest.raises(UnprovenError, match=r"expected the failure of the run, got .*connected"):
        proof.judge_starved({"connected": 2}, {})


def test_a_sanitizer_that_sees_no_planted_race_proves_nothing():
    known = {LATE: as_ledger(training(1))}
    trainings = {LATE: [training(1)]}
    assert "no race" in judge_streams({"planted": "a race", "trainings": trainings}, known)[0]
    with pytest.raises(UnprovenError, match="planted"):
        judge_streams({"planted": "", "trainings": trainings}, known)


def test_host_waits_have_a_budget_and_those_beyond_it_are_named_with_their_line():
    late, early = LATE, CHECKED
    other = {"steps": 6, "lines": ["step.py:12"], "events": 6, "polls": 12}
    facts = {name: {"waits": waits, **other} for name, waits in ((late, 0), (early, 6))}
    assert judge_waits(facts, {})[1] == {
        f"{late}, waits a step": 0.0,
        f"{late}, events a step": 1.0,
        f"{late}, polls a step": 2.0,
        f"{early}, waits a step": 1.0,
        f"{early}, events a step": 1.0,
        f"{early}, polls a step": 2.0,
    }
    for name, waits in ((late, 1), (early, 7)):
        with pytest.raises(UnprovenError, match=rf"{name}: expected at most \d host waits? a step, got {waits} .*:12"):
            judge_waits({**facts, name: {**facts[name], "waits": waits}}, {})


def test_logical_devices_must_give_one_digest_and_memory_has_a_budget():
    assert judge_logical({"1 GPU, run 1": "a", "4 GPUs, run 1": "a"}, {})[0].endswith("on 1 GPU, run 1, 4 GPUs, run 1")
    with pytest.raises(UnprovenError, match="expected the same weights every time, got"):
        judge_logical({"1 GPU, run 1": "a", "4 GPUs, run 1": "b"}, {})
    assert judge_memory({"allocated": 2.5, "reserved": 3.0}, {})[1]["reserved_in_gradients"] == 3.0
    with pytest.raises(UnprovenError, match=r"at most 4\.5 gradients in memory, got 5\.00"):
        judge_memory({"allocated": 5.0, "reserved": 6.0}, {})


def test_a_machine_is_proven_only_if_no_row_has_failed_and_none_was_too_late():
    def said(proven=True, left_out=(), **row):
        rows = [{"name": "bits", "state": "good", "out_of_time": False, **row}]
        return proof.verdict({"rows": rows, "proven": proven, "left_out": left_out, "scope": "one GPU"})

    assert said() == "proven for one GPU"
    # What the machine has not is no part of its proof, and is told.
    assert said(state="note", left_out=["bits"]) == "proven for one GPU; left out: bits"
    assert said(proven=False, left_out=["collectives"]) == "partly proven for one GPU; left out: collectives"
    assert said(state="bad") == "not proven: bits"
    assert said(state="note", out_of_time=True).startswith(
        "partly proven: the 20 minutes were over before 1 row: bits;"
    )


def test_folds_that_differ_between_a_gpu_and_the_host_are_named():
    assert proof.judge_operations({"count": 90, "differ": []}, {})[0] == "90 folds: the same bits"
    with pytest.raises(UnprovenError, match="AVG of 3 ranks in float32"):
        proof.judge_operations({"count": 90, "differ": ["AVG of 3 ranks in float32"]}, {})


@pytest.mark.parametrize(("cc", "is_there"), [("", False), ("/opt/gcc", True)])
def test_triton_without_a_compiler_leaves_its_rows_out(cc, is_there, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", cc)
    monkeypatch.setattr(proof, "is_installed", lambda name: True)
    rows = {row.name.partition(" on ")[0]: row for row in rows_of("auto", machine(gpu(0)))}
    assert (rows["torch.compile"].selection is not None) == is_there


def test_a_proof_for_which_the_time_was_too_short_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "TOTAL_SECONDS", 10.0)
    content = proof.prove("cpu:2", tmp_path, quick=True, timeout_seconds=60.0)
    assert content["proven"] is False
    assert {row["state"] for row in content["rows"]} == {"note"}
    assert "models and precisions on 2 CPU workers" in proof.verdict(content)
    assert "stream sanitizer" not in proof.verdict(content)


def test_collectives_have_their_figures():
    right = good("nccl: broadcast", "right in 18 cases")
    facts = [vars(replace(right, numbers={"latency_us": 7.0})), vars(good("ranks", "2 started"))]
    assert judge_collectives(facts, {}) == ("1 right to the bit, by nccl", {"nccl: broadcast, latency_us": 7.0})
    wrong = {**vars(right), "state": "bad", "found": "wrong on rank 1", "advice": "look"}
    with pytest.raises(UnprovenError, match=r"nccl: broadcast: wrong on rank 1 \(look\)"):
        judge_collectives([wrong], {})


def test_the_file_is_named_after_the_devices(tmp_path):
    two = select("auto", machine(*(replace(gpu(index), name="NVIDIA H100 80GB HBM3") for index in range(2))))
    assert proof._path_in(tmp_path, two) == tmp_path / "proven-NVIDIA-H100-80GB-HBM3-x2.json"
    cpus = select("cpu:2", machine(torch=CPU_TORCH))
    assert proof._path_in(tmp_path, cpus).name == "proven-cpu-Some-CPU-x2.json"
    assert proof._path_in(tmp_path / "mine.json", cpus) == tmp_path / "mine.json"
    with pytest.raises(UsageError, match="there is no folder"):
        proof._path_in(tmp_path / "none" / "mine.json", cpus)
    with pytest.raises(RunFolderError, match=r"cannot write /proc/mine\.json: .*another place by --output"):
        proof._path_in(Path("/proc/mine.json"), cpus)


def cpu_row(**changes):
    (row,) = [
        row
        for row in rows_of("cpu:2", machine(torch=CPU_TORCH))
        if row.name == "models and precisions on 2 CPU workers"
    ]
    return replace(shortened(row), **changes)


@pytest.mark.slow
def test_a_row_that_hangs_or_crashes_fails_alone_and_leaves_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    hangs = cpu_row(
        name="hangs", seconds=3.0, options={"names": list(PLACED) * 500, "num_microbatches": 8, "epochs": 3}
    )
    crashes = cpu_row(name="crashes", program="no such program")
    missing = cpu_row(name="missing", selection=None, missing="needs a moon")
    found = proof.run_rows([hangs, crashes, missing])
    assert [entry["state"] for entry in found] == ["bad", "bad", "note"]
    assert "Timeout" in found[0]["log"]
    assert "in train" in found[0]["log"]  # the stack of the worker
    assert "KeyError: 'no such program'" in found[1]["found"]
    assert found[2]["found"] == "left out: needs a moon"
    assert "2 of 3  crashes … bad" in capfd.readouterr().err
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's cache


@pytest.mark.slow
def test_two_cpu_workers_are_proven_from_the_command_line(tmp_path):
    words = ["doctor", "--prove", "--quick", "--devices", "cpu:2", "--output", str(tmp_path), "--json"]
    clean = {name: value for name, value in os.environ.items() if name != "SAMESTEP_TRANSPORT"}
    command = [sys.executable, "-m", "samestep", *words]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("proven-cpu-")
    content = json.loads(file.read_text())
    assert content == json.loads(done.stdout)
    assert content["proven"] is False  # without the collectives
    assert "collectives on 2 CPU workers" in content["left_out"]
    assert {row["state"] for row in content["rows"] if "left out" not in row["found"]} == {"good"}
    assert content["torch"]["version"]
    assert "Traceback" not in done.stderr


@gpus.needs_fake_gpus
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 4])
def test_fake_gpus_are_proven_from_start_to_end(count):
    environment = gpus.environment(count)
    command = [sys.executable, str(PROGRAM), "auto"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[0]["name"].endswith("on 1 GPU"), "the process has fake GPUs"
    assert [(row["name"], row["found"]) for row in found if row["state"] == "bad"] == []


@pytest.mark.parametrize("words", [("--output", "x"), ("--prove", "--output", "none/x.json", "--devices", "cpu:1")])
def test_bad_usage_of_the_proof_is_said_at_once(words, tmp_path):
    command = [sys.executable, "-m", "samestep", "doctor", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
