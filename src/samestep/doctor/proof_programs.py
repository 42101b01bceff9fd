"""The programs of `samestep doctor --prove`, run by the workers of a row; rank 0's return value is the row's facts."""

import faulthandler
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.digest import Drift, as_hex, state_checksum, state_digest
from samestep.comm.communicator import Communicator
from samestep.comm.environment import read_environment
from samestep.comm.sequential import SequentialTransport, SequentialWorld
from samestep.comm.transport import wait_until
from samestep.doctor.proof_script import PLACES, WIDTH, Attention
from samestep.engine.observer import StepObserver
from samestep.engine.rank_device import own_device
from samestep.engine.result import StepResult
from samestep.logical.collectives import Operation
from samestep.recipes import gpt, lenet
from samestep.run.run import Run
from samestep.run.trainer import Trainer

SEED = 17
BATCH, SAMPLES = 32, 85  # an epoch's last batch is shorter, and the microbatches do not divide it
CONTEXT, MAX_GRAD_NORM, BUCKET_BYTES = 32, 1.0, 64 << 10  # several buckets even of a small model
KILLED_IN_STEP = 2
WARM_STEPS, COUNTED_STEPS = 4, 6
LARGE_LAYERS, LARGE_WIDTH = 16, 1024  # 64 MiB of gradients, in several buckets
SYNCHRONIZING = "synchronizing CUDA operation"  # in torch's warning: c10/cuda/CUDAFunctions.cpp
Facts = dict[str, Any]


def start(program: str, seconds: float, options: Mapping[str, Any]) -> Any:
    """Runs a program; a worker for which the time is too short writes its stacks and ends."""
    # By a thread in C: a worker that hangs in a call of CUDA or NCCL runs no Python, and no handler of a signal.
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        return PROGRAMS[program](**options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def make_lenet() -> nn.Module:
    """The recipe's LeNet, with BatchNorm after its convolutions and dropout before its last layer."""
    layers = list(lenet.make_model().children())
    convolutions = [layers[0], nn.BatchNorm2d(20), *layers[1:4], nn.BatchNorm2d(50)]
    return nn.Sequential(*convolutions, *layers[4:-1], nn.Dropout(0.2), layers[-1])


def make_gpt() -> nn.Module:
    """The recipe's GPT, with dropout, and an output with weights of its own."""
    return gpt.Gpt(2, 64, heads=4, context=CONTEXT, dropout=0.1, tied=False)


def random_images(count: int) -> tuple[Tensor, Tensor]:
    """Images of noise, with labels."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(count, 1, 28, 28, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def random_texts(count: int, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Texts of random bytes, with the next byte of each."""
    texts = torch.randint(0, gpt.NUM_BYTES, (count, context + 1), generator=torch.Generator().manual_seed(SEED))
    return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()


def make_attention() -> nn.Module:
    """Attention by torch's fused kernels, over as many places as these need to add in several parts."""
    return nn.Sequential(nn.Embedding(gpt.NUM_BYTES, WIDTH), Attention(), nn.Linear(WIDTH, gpt.NUM_BYTES))


class Large(nn.Module):
    """Convolutions in NHWC, an LSTM and products, of sizes for which libraries have several kernels and split sums."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3, padding=1)]
        self.convolutions = nn.Sequential(*convolutions).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.lstm = nn.LSTM(28, 256, batch_first=True)
        self.products = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.Linear(4096, 10))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, 28, 28] to [N, 10]."""
        rows = self.convolutions(x.to(memory_format=torch.channels_last)).mean(1)  # [N, 28, 28]
        scores: Tensor = self.products(self.lstm(rows)[0][:, -1])
        return scores


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[int], Any]]] = {
    "lenet": (make_lenet, lenet.loss_fn, random_images),
    "gpt": (make_gpt, gpt.loss_fn, random_texts),
    "large": (Large, lenet.loss_fn, random_images),
    "attention": (make_attention, gpt.loss_fn, lambda count: random_texts(count, PLACES)),
}


def make_optimizer(name: str, model: nn.Module, device: torch.device) -> Optimizer:
    """SGD with momentum, or AdamW: fused on a GPU, where the host then waits for nothing."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True if device.type == "cuda" else None)


def build(name: str, run: Run, *, graphs: bool = False) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    """The model, optimizer and further arguments of the step of a training such as "gpt bf16-mixed adamw"."""
    kind, precision, optimizer = name.split()
    make, loss, _ = MODELS[kind]
    model = make()
    if graphs:
        model.compile(mode="reduce-overhead")
    options = {
        "loss_fn": loss,
        "precision": precision,
        "max_grad_norm": MAX_GRAD_NORM,
        "bucket_bytes": BUCKET_BYTES,
    }
    return model, make_optimizer(optimizer, model, run.device), options


def data_of(name: str, count: int = SAMPLES) -> Any:
    """The samples of a training."""
    return MODELS[name.split()[0]][2](count)


def train(name: str, run: Run, epochs: int, *, graphs: bool = False, **more: Any) -> Facts:
    """Trains; the steps as in a ledger, with a checksum of the state each, and the digest of the final state."""
    print(f"{name} on {run.world_size}", file=sys.stderr, flush=True)  # the row's log shows how far it came
    model, optimizer, options = build(name, run, graphs=graphs)
    step = run.train_step(model, optimizer, **options, **more)
    loader = run.loader(data_of(name), shuffle=True)
    taken: list[tuple[StepResult, Tensor]] = []
    for _ in range(epochs):
        for batch in loader:
            taken.append((step(batch), state_checksum(step)))  # read at the end: until then the host runs ahead
    Drift(run.membership, [step]).check()
    return {"steps": [as_entry(*each) for each in taken], "digest": state_digest(step)}


def as_entry(result: StepResult, checksum: Tensor) -> Facts:
    """A step as a line of the ledger."""
    return {
        "step": result.step,
        "num_samples": result.num_samples,
        "loss": result.loss.hex(),
        "grad_norm": result.grad_norm.hex(),
        "skipped": result.skipped,
        "digest": as_hex(int(checksum)),
    }


def trainings(
    names: Sequence[str],
    num_microbatches: int,
    epochs: int,
    repeats: int = 1,
    **more: Any,
) -> Facts:
    """Several trainings one after another, each some times, over the same connections."""
    over = Run(BATCH, num_microbatches, SEED).communicator
    found: Facts = {}
    for name in names:
        runs = (Run(BATCH, num_microbatches, SEED, communicator=over) for _ in range(repeats))
        found[name] = [train(name, run, epochs, **more) for run in runs]
    return found


class Kill(StepObserver):
    """Sends this process a signal before it exchanges gradients of a step."""

    def __init__(self, by: str) -> None:
        self._step, self._signal = 0, signal.Signals[by]

    def on_step(self, step: Any, batch: Any) -> None:
        self._step = step.num_steps

    def on_phase(self, phase: str) -> None:
        if phase == "exchange" and self._step == KILLED_IN_STEP:
            os.kill(os.getpid(), self._signal)


def killed(name: str, num_microbatches: int, epochs: int, folder: str, by: str | None = "SIGKILL") -> Facts:
    """A training whose last rank gets a signal, upon which the others go on; without one it resumes the folder's."""
    run = Run(BATCH, num_microbatches, SEED)
    model, optimizer, options = build(name, run)
    options |= {"observers": [Kill(by)] if by and run.rank == run.world_size - 1 else [], "checkpoint_steps": 1}
    with Trainer(run, model, optimizer, run_dir=folder, checkpoint_minutes=None, digest_every=1, **options) as trainer:
        trainer.fit(data_of(name), epochs, resume=None if by else "auto")
        return {"digest": trainer.digest}


def starved(num_microbatches: int) -> Facts:
    """Connects ranks after the last one has filled its GPU: NCCL finds no memory there, and that is to end the run."""
    place = read_environment()
    device, held, size = own_device(None, place), list[Tensor](), 1 << 30
    while place.rank == place.world_size - 1 and size >= 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:  # torch takes 20 MiB for requests of less than 10, and 2 for one of 1
            size = size // 2 if size > 32 << 20 else 1 << 20 if size > 1 << 20 else 0
    del held[-1:]  # torch keeps it, for its own small tensors
    return {"connected": Run(BATCH, num_microbatches, SEED).world_size}


def operations(num_microbatches: int) -> Facts:
    """The folds of process groups whose bits differ between a GPU and the host."""
    device, dtypes = Run(BATCH, num_microbatches, SEED).device, (torch.float32, torch.bfloat16, torch.int32)
    cases = list(itertools.product(("SUM", "AVG", "PRODUCT", "MIN", "MAX"), (2, 3, 5, 6, 7, 8), dtypes))
    differ = []
    for name, ranks, dtype in cases:
        # A prime number of elements, which no block of a kernel divides.
        parts = [(3 * torch.randn(10_007)).to(dtype) for _ in range(ranks)]
        host, there = torch.empty_like(parts[0]), torch.empty_like(parts[0], device=device)
        Operation(name).fold(parts, host)
        Operation(name).fold([part.to(device) for part in parts], there)
        if not torch.equal(host.view(torch.uint8), there.cpu().view(torch.uint8)):
            differ.append(f"{name} of {ranks} ranks in {dtype}")
    return {"count": len(cases), "differ": differ}


def streams(names: Sequence[str], num_microbatches: int, epochs: int) -> Facts:
    """Trainings under torch's stream sanitizer, which ends a program at the first access that is not ordered."""
    from torch.cuda._sanitizer import CUDASanitizerErrors, enable_cuda_sanitizer

    run = Run(BATCH, num_microbatches, SEED)
    enable_cuda_sanitizer()
    planted = ""
    side, filled = torch.cuda.Stream(run.device), torch.ones(1000, device=run.device)
    try:  # a sanitizer that finds nothing here would find nothing anywhere
        with torch.cuda.stream(side):
            filled.mul_(2)
    except CUDASanitizerErrors as error:
        planted = str(error)
    torch.cuda.synchronize()

    def trained(over: Communicator, **more: Any) -> Facts:
        return {
            name: [train(name, Run(BATCH, num_microbatches, SEED, communicator=over), epochs, **more)] for name in names
        }

    def rank_main(transport: SequentialTransport) -> Facts:
        enable_cuda_sanitizer()  # it watches one thread
        transport.stream = side  # of both ranks, which hand tensors over on it
        # Not beside the backward: autograd has one thread a device, in which one rank would wait for the other's turn.
        return trained(Communicator(run.device, transport, transport), overlap=False)

    if run.world_size == 1:
        return {"planted": planted, "trainings": SequentialWorld(2).run(rank_main)[0]}
    assert run.communicator.folds_beside, "between GPUs the exchange has a stream of its own"
    return {"planted": planted, "trainings": trained(run.communicator)}


def host_waits(names: Sequence[str], num_microbatches: int, folder: str = "") -> Facts:
    """How often the host waits for the device in some steps, and at which lines, by training.

    "waits" are those that torch's debug mode reports. It says nothing of the others: "events", of `Event.synchronize`,
    and "polls" of `Event.query` until the device is there, which a run that may heal takes instead.
    """
    over = Run(BATCH, num_microbatches, SEED).communicator
    found: Facts = {}
    for name in names:
        run = Run(BATCH, num_microbatches, SEED, communicator=over)
        model, optimizer, options = build(name, run)
        step = run.train_step(model, optimizer, **options)
        calls = {"events": 0, "polls": 0}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = run.loader(data_of(name, (WARM_STEPS + COUNTED_STEPS) * BATCH))
            for number, batch in enumerate(batches):
                if number == WARM_STEPS:
                    torch.cuda.set_sync_debug_mode("warn")
                    caught.clear()
                    sys.setprofile(partial(_count_call, calls))
                step(batch)
            sys.setprofile(None)
            torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in caught if SYNCHRONIZING in str(each.message)]
        lines = sorted({f"{each.filename}:{each.lineno}" for each in waits})
        found[name] = {"steps": COUNTED_STEPS, "waits": len(waits), "lines": lines, **calls}
    return found


def _count_call(calls: dict[str, int], frame: FrameType, event: str, called: Any) -> None:
    """Counts the calls of functions that wait for an event (`sys.setprofile`)."""
    if event == "call" and frame.f_code is wait_until.__code__:
        calls["polls"] += 1
    elif event == "c_call" and getattr(called, "__name__", "") == "synchronize":
        calls["events"] += 1


def memory(num_microbatches: int) -> Facts:
    """The memory of a device beside the parameters, in units of the size of one gradient."""
    run = Run(BATCH, num_microbatches, SEED)
    model = nn.Sequential(*(nn.Linear(LARGE_WIDTH, LARGE_WIDTH, bias=False) for _ in range(LARGE_LAYERS)))
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.01), mean_squares)
    one = sum(parameter.nbytes for parameter in model.parameters())
    for number, batch in enumerate(run.loader(torch.randn((WARM_STEPS + COUNTED_STEPS) * BATCH, LARGE_WIDTH))):
        if number == WARM_STEPS:
            step.check()
            torch.cuda.reset_peak_memory_stats(run.device)
        step(batch)
    step.check()
    before = torch.cuda.memory_allocated(run.device)
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    one_more = 1 + (before - torch.cuda.memory_allocated(run.device)) / one  # cuBLAS' workspaces, which all loops have
    peaks = {"allocated": torch.cuda.max_memory_allocated, "reserved": torch.cuda.max_memory_reserved}
    return {name: peak(run.device) / one - one_more for name, peak in peaks.items()}


def mean_squares(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean square of what a model makes of a batch."""
    squares: Tensor = model(batch).square()
    return squares.mean()


PROGRAMS: Mapping[str, Callable[..., Facts]] = {
    "trainings": trainings,
    "killed": killed,
    "starved": starved,
    "operations": operations,
    "streams": streams,
    "host_waits": host_waits,
    "memory": memory,
}
