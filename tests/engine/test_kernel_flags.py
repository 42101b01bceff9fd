"""Flags of torch that decide which kernels run, and how they round: recorded, and not changed within a run."""

import pytest
import torch
from engine_programs import in_turns, mean_squared, table
from torch import nn
from torch.backends import cuda, cudnn, mkldnn
from worlds import DEVICE

from samestep.engine.kernel_flags import recorded_flags
from samestep.errors import DeterminismError
from samestep.run.run import Run

gpu_only = pytest.mark.skipif(DEVICE == "cpu", reason="a flag of GPUs alone")


@pytest.fixture(autouse=True)
def _put_back():
    yield
    torch.set_default_dtype(torch.float32)
    cuda.matmul.allow_bf16_reduced_precision_reduction = True
    cuda.enable_flash_sdp(True)


def setting(place, name, value):
    return lambda: setattr(place, name, value)


MODE = "deterministic_debug_mode is {} {} 2; .* leave deterministic algorithms on"
CHANGES = {
    "deterministic algorithms off": (lambda: torch.use_deterministic_algorithms(False), MODE.format(0, "{}")),
    "deterministic algorithms may be missing": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        MODE.format(1, "{}"),
    ),
    "benchmark": (setting(cudnn, "benchmark", True), r"cudnn\.benchmark is True {} False; .* by their time"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "default_dtype is torch.float64 {} torch.float32"),
    "products": (lambda: torch.set_float32_matmul_precision("medium"), r"matmul\.fp32_precision is \w+ {} ieee"),
    "everything": (setting(torch.backends, "fp32_precision", "tf32"), r"matmul\.fp32_precision is tf32 {} ieee"),
    "convolutions": (setting(cudnn, "allow_tf32", False), r"cudnn\.conv\.fp32_precision is ieee {} tf32"),
    "convolutions, by their own name": (
        setting(cudnn.conv, "fp32_precision", "ieee"),
        r"cudnn\.conv\.fp32_precision is ieee {} tf32; .* set them earlier",
    ),
    "products in 16 bits": (
        setting(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        r"matmul\.allow_bf16_reduced_precision_reduction is False {} True",
    ),
    "attention": (lambda: cuda.enable_flash_sdp(False), "flash_sdp is False {} True"),
}
OF_GPUS = {"benchmark", "convolutions", "convolutions, by their own name", "products in 16 bits", "attention"}
ENFORCED = ("deterministic algorithms off", "deterministic algorithms may be missing", "benchmark")


def cases(names):
    return [pytest.param(name, marks=[gpu_only] if name in OF_GPUS else []) for name in names]


def train(change, before_the_step=False):
    """A step, a change of a flag, and another step."""

    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model, data = nn.Linear(5, 1), table()
        if before_the_step:
            change()
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)
        step(data)
        if not before_the_step:
            change()
        return step(data).step

    return in_turns(1, program)[0]


@pytest.mark.parametrize("name", cases(CHANGES))
def test_a_flag_that_changes_between_two_steps_is_named_by_the_next(name):
    change, message = CHANGES[name]
    with pytest.raises(DeterminismError, match=message.format("where the step was made with")):
        train(change)


@pytest.mark.parametrize("name", cases(ENFORCED))
def test_a_flag_that_the_run_has_set_is_not_changed_before_the_step_is_made_either(name):
    change, message = CHANGES[name]
    with pytest.raises(DeterminismError, match=message.format("where samestep.Run needs")):
        train(change, before_the_step=True)


@pytest.mark.parametrize("name", cases(sorted(CHANGES.keys() - {*ENFORCED})))
def test_other_flags_may_be_set_until_the_step_is_made(name):
    assert train(CHANGES[name][0], before_the_step=True) == 2


def test_what_changes_within_a_forward_alone_is_no_change():
    def change():
        with cudnn.flags(enabled=True, benchmark=True):
            pass

    assert train(change) == 2


@gpu_only
def test_products_that_are_chosen_by_their_time_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    with pytest.raises(DeterminismError, match=r"tunable is True where samestep\.Run needs False; .* unset PYTORCH"):
        train(lambda: None)


DEFAULT = {"float32_matmul_precision": "highest", "cudnn_allow_tf32": True}


@pytest.mark.parametrize(
    ("change", "recorded"),
    [
        (lambda: None, {}),
        (lambda: torch.set_float32_matmul_precision("high"), {"float32_matmul_precision": "high"}),
        (lambda: torch.set_float32_matmul_precision("medium"), {"float32_matmul_precision": "medium"}),
        (setting(cuda.matmul, "allow_tf32", True), {"float32_matmul_precision": "high"}),
        (setting(cuda.matmul, "fp32_precision", "tf32"), {"float32_matmul_precision": "high"}),
        (setting(mkldnn.matmul, "fp32_precision", "bf16"), {"float32_matmul_precision": "ieee on CUDA, bf16 on CPUs"}),
        (setting(cudnn, "allow_tf32", False), {"cudnn_allow_tf32": False}),
        (setting(cudnn.conv, "fp32_precision", "ieee"), {"cudnn_allow_tf32": "conv ieee, rnn tf32"}),
        (setting(mkldnn.conv, "fp32_precision", "bf16"), {"mkldnn.conv.fp32_precision": "bf16"}),
        (
            setting(torch.backends, "fp32_precision", "tf32"),
            {
                "float32_matmul_precision": "high",
                "mkldnn.conv.fp32_precision": "tf32",
                "mkldnn.rnn.fp32_precision": "tf32",
            },
        ),
    ],
)
def test_the_contract_has_the_precisions_however_they_were_set(change, recorded):
    change()
    others = {"cudnn_benchmark": False, "deterministic_algorithms": False, "default_dtype": "float32"}
    assert recorded_flags("cpu") == DEFAULT | others | recorded
    assert recorded_flags("cuda").items() >= {**DEFAULT, **recorded, "flash_sdp": True}.items()
