"""Each bug that the GPU code once had is put back, one by one: the test that was written for it must fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpus import environment, needs_fake_gpus

ROOT = Path(__file__).resolve().parents[2]

ON_GPUS = "on GPUs: "
MUTANTS = {  # name: (file, text, its replacement), …, the file of the test and which of it
    "healing over NCCL": (
        ("comm/membership.py", "wait_until(event.query, ", "wait_until(lambda: True, "),
        "healing/test_healing_over_nccl.py -k no_trace and not hundreds",
    ),
    "a host that waits for a lost rank": (
        ("comm/group.py", "wait_until(work.is_completed, check, self._timeout)", "pass"),
        "healing/test_healing_over_nccl.py -k no_trace and not hundreds",
    ),
    "an abort without a limit": (
        ("comm/transport.py", "thread.join(ABORT_SECONDS)", "thread.join()"),
        "healing/test_healing_over_nccl.py -k abort_that",
    ),
    "launches that fill the queue behind a lost rank": (
        ("comm/group.py", "if len(self._queued) > MOST_QUEUED:", "if False:"),
        "comm/test_gpus.py -k before_launches",
    ),
    "a failed group that waits for its last transfer": (
        (
            "logical/process_group.py",
            "self._over_nccl.close() if self._failure is None else",
            "self._over_nccl.close() or",
        ),
        "comm/test_gpus.py -k at_odds",
    ),
    "ranks with unlike GPUs": (
        ("checkpoint/contract.py", "if len(set(values)) > 1}:", "if False}:"),
        "comm/test_gpus.py -k round_otherwise",
    ),
    "attention that adds by atomics": (
        ("engine/deterministic_kernels.py", "warn_only=False)", "warn_only=True)"),
        "cli/test_run_logical.py -k attention",
    ),
    "attention of cuDNN": (
        ("logical/ranks.py", "enable_cudnn_sdp(False)", "enable_cudnn_sdp(True)"),
        "cli/test_run_logical.py -k attention",
    ),
    "kernels that are not registered": (
        ("engine/determinism.py", "    register_kernels()\n", ""),
        "cli/test_commands_on_gpus.py -k refused_ones",
    ),
    "every rank on the first GPU": (
        ("engine/rank_device.py", "index = environment.local_rank % max(", "index = 0 * max("),
        "run/test_own_device.py",
    ),
    "a device that is not made current": (
        ("engine/rank_device.py", 'if device.type == "cuda":', "if False:"),
        "run/test_own_device.py",
    ),
    "an event on the current device's stream": (
        ("engine/step.py", "event.record(torch.cuda.current_stream(scalars_on))", "event.record()"),
        "engine/test_gpu_steps.py -k whichever_device_is_current",
    ),
    "NCCL by the numbers that GPUs have in their processes": (
        ("comm/connecting.py", "str(torch.cuda.get_device_properties(device).uuid)", "str(device)"),
        "comm/test_gpus.py -k with_a_gpu_each_use_nccl",
    ),
    "a late failure that each rank raises by itself": (
        ("engine/step.py", "failed = first.step if", "failed = 0 if"),
        "engine/test_nonfinite.py -k in_the_same_call",
    ),
    "a wait for each microbatch's count": (
        ("engine/result.py", "part.fill_(number)", "part.copy_(torch.full((), number))"),
        "engine/test_gpu_steps.py -k host_waits",
    ),
    "folding that is quadratic in buckets": (
        (
            "engine/gradients.py",
            "for reduction in self._under_way if not reduction.is_done]",
            "for reduction in self._under_way]",
        ),
        "comm/test_stream.py -k not_with_its_square",
    ),
    "a late check where the CPU updates": (
        ("engine/finite_check.py", 'device.type == "cpu" or is_offloaded', 'device.type == "cpu"'),
        "engine/test_nonfinite.py -k update_is_one_of_the_cpu",
    ),
    "cuBLAS's variable set too late": (
        ("__init__.py", 'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")', "pass"),
        "test_layers.py",
    ),
    "groups along the axes by counting luck": (
        ("comm/group.py", 'if backend == "gloo":\n        ours', "if False:\n        ours"),
        "comm/test_gpus.py -k gloo_groups",
    ),
    "an exit that waits for NCCL after an error": (
        ("comm/group.py", 'if self._has_failed or getattr(sys, "last_value", None) is not None:', "if False:"),
        "comm/test_group.py -k dropped_at_once or ends_the_program",
    ),
    "generators that escape the map of devices": (
        ("scripts/simulated/devices.py", "generator(read(asked))", "generator(asked)"),
        "scripts/test_simulated_cuda.py -k names_four_gpus",
    ),
    "texts of out-of-memory that are not known": (
        ("engine/diagnosis.py", '"CUBLAS_STATUS_ALLOC_FAILED|', '"CUBLAS_STATUS_UNKNOWN|'),
        "engine/test_memory.py -k other_errors_are_no_shortage",
    ),
    "CPU threads of a GPU rank by the cores": (
        ("engine/determinism.py", "torch.set_num_threads(threads)", "pass"),
        "run/test_own_device.py",
    ),
    "BatchNorm's statistics by the mode that a loss leaves": (
        (
            "engine/buffers.py",
            "self._trained[index] or self._means[index].module.training",
            "self._means[index].module.training",
        ),
        "on GPUs: engine/test_hard_cases.py -k evaluation_mode",
    ),
    "an exchange that does not wait for the gradients": (
        ("comm/reduction.py", "stream.wait_stream(torch.cuda.current_stream(stream.device))", "pass"),
        "comm/test_stream.py -k exchange_reads",
    ),
    "an update that does not wait for the exchange": (
        ("comm/reduction.py", "torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)", "pass"),
        "comm/test_stream.py -k exchange_reads",
    ),
    "a copy to pinned memory that nothing waits for": (
        ("logical/process_group.py", "torch.cuda.current_stream(tensors[0].device).synchronize()", "pass"),
        "cli/test_run_logical.py -k four_gpus",
    ),
    "memory of an exchange that is free before it has ended": (
        ("comm/reduction.py", "self._used = () if stream is None else tuple(used)", "self._used = ()"),
        "comm/test_stream.py -k exchange_reads",
    ),
    "an error of NCCL's that passes for a lost rank": (
        ("comm/group.py", "if own := nccl_failure(str(error), self.ranks[self.rank]):", "if own := None:"),
        "comm/test_nccl_errors.py -k later_exchange",
    ),
    "nodes that NCCL has not tried when the ranks connect": (
        ("comm/hierarchical_reduction.py", "exchange_a_byte(between, device)", "pass"),
        "comm/test_nccl_errors.py -k some_ranks and between and nodes",
    ),
    "a rank that waits with its error for ranks that NCCL holds back until it ends": (
        ("comm/group.py", "control.limit_waits(min(timeout, timedelta(seconds=FAILURE_SECONDS)))", "pass"),
        "comm/test_nccl_errors.py -k while_others or while and others",
    ),
    "programs of a rank that find all GPUs": (
        (
            "logical/ranks.py",
            "os.unsetenv(VISIBLE_DEVICES) if own is None else os.putenv(VISIBLE_DEVICES, own)",
            "pass",
        ),
        "cli/test_run_logical.py -k programs_that_a_rank",
    ),
    "numbers of NVIDIA's library by the variable that the script sees": (
        ("scripts/simulated/devices.py", 'Patch(torch.cuda, "_parse_visible_devices", lambda: own),', ""),
        "cli/test_run_logical.py -k programs_that_a_rank",
    ),
    "an average by the reciprocal": (
        ("logical/collectives.py", "divide([numbers], world_size)", "numbers.div_(world_size)"),
        "on GPUs: comm/test_process_group.py -k every_reduction and 3",
    ),
    "the largest number as torch takes it": (
        (
            "logical/collectives.py",
            "low, high = (right, left) if is_largest else (left, right)",
            "return (torch.maximum if is_largest else torch.minimum)(left, right, out=out)",
        ),
        "comm/test_process_group.py -k every_reduction and 2",
    ),
    "scans of one row by look-back": (
        ("engine/deterministic_kernels.py", "if x.dim() == 0 or x.numel() != x.size(dim):", "if True:"),
        "on GPUs: engine/test_deterministic_kernels.py -k cumprod or logcumsumexp",
    ),
    "convolutions chosen by their time in a block": (
        ("scripts/script_state.py", ', Patch(torch._C, "_set_cudnn_benchmark", refuse)]', "]"),
        "cli/test_commands_on_gpus.py -k chosen_by_their_time",
    ),
    "an abandoned exchange that writes to freed memory": (
        ("engine/gradients.py", "reduction.release()", "pass"),
        "engine/test_gpu_memory.py -k abandoned",
    ),
}


def test_what_the_bugs_replace_is_there_once():
    edits = [(name, *edit) for name, (*some, _) in MUTANTS.items() for edit in some]
    contents = {file: (ROOT / "src" / "samestep" / file).read_text(encoding="utf-8") for _, file, _, _ in edits}
    assert [name for name, file, text, _ in edits if contents[file].count(text) != 1] == []


@needs_fake_gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_that_is_put_back_is_caught(name, tmp_path):
    *edits, test = MUTANTS[name]
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text, replacement in edits:
        path = source / "samestep" / file
        content = path.read_text(encoding="utf-8")
        assert content.count(text) == 1, f"{text!r} in {file}"
        path.write_text(content.replace(text, replacement), encoding="utf-8")
    file, _, chosen = test.removeprefix(ON_GPUS).partition(" -k ")
    command = [sys.executable, "-m", "pytest", f"tests/{file}", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    own = environment(8, SAMESTEP_TEST_DEVICE="cuda") if test.startswith(ON_GPUS) else dict(os.environ)
    own["PYTHONPATH"] = os.pathsep.join([str(source), *filter(None, [own.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "-k", chosen], cwd=ROOT, env=own, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-1000:]  # a test failed; 2 and more is another error
