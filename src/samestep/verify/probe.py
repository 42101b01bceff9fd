"""The probe: runs a program in a worker and records its steps, without changing a number.

Its own wraps come first, then `FactRecorder`'s, which enclose them, and then the antidotes of the causes that
are to have no effect; all before the program is imported. After every step, and at the end, the recorder's facts become
lines of the recording.
"""

import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.data.batch import Batch
from samestep.data.checksums import checksum
from samestep.data.nested import leaves
from samestep.engine.observer import StepObserver, observed_by
from samestep.engine.portable_kernels import portable_form
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import UsageError
from samestep.logical.ranks import run_logical
from samestep.patch import applied, exits_raised
from samestep.scripts import data_parallel
from samestep.scripts.multi_process import run_multi_process
from samestep.scripts.script_state import ScriptState
from samestep.scripts.single_process import run_single_process
from samestep.scripts.split_forward import driver, forward, shared_forward
from samestep.scripts.workers import flags, serve
from samestep.verify.causes.table import CAUSES, FactRecorder
from samestep.verify.recording import JsonlWriter
from samestep.verify.summaries import bits
from samestep.verify.trained_batches import Batches, Metrics, describe
from samestep.verify.watching import EPSILONS, ModuleRecorder, ShardedParameters, StepRecorder, with_gradients
from samestep.verify.wraps import Wrap, patches_for, wrapped

PATIENCE_SECONDS = 20.0
_sleep, _open, _close, _exists, _exit = time.sleep, os.open, os.close, os.path.exists, os._exit  # scripts' are patched


class WatchedEnough(BaseException):
    """Ends the program; no `Exception`, so that a script that catches its own failures does not catch it."""


class EndBarrier:
    """Ends this rank once all ranks are there: an earlier end would break an exchange that is still under way."""

    def __init__(self, folder: str, rank: int, others: Sequence[int], finish: Callable[[str], None]) -> None:
        self._own, *self._marks = (str(Path(folder) / f"rank-{each}.done") for each in (rank, *others))
        self._finish = finish
        self._num_tries = 0

    def mark(self) -> None:
        """Leaves a file that shows the other ranks that this one needs no more exchanges."""
        _close(_open(self._own, os.O_CREAT | os.O_WRONLY, 0o600))

    def end(self) -> None:
        """Waits for the others, then ends the program; the process, if the program caught that twice and went on."""
        self._num_tries += 1
        if self._num_tries == 1:
            self.mark()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not all(_exists(mark) for mark in self._marks) and time.monotonic() < deadline:
                _sleep(0.01)
        if self._num_tries > 2:
            self._finish("steps")
            _exit(0)
        raise WatchedEnough


def run_probed(
    kind: str,
    target: str,
    argv: Sequence[str],
    single_process: Mapping[str, Any] | None,
    logical: Mapping[str, Any] | None,
    folder: str,
    steps: int,
    detail: int | None,
    neutral: Sequence[str],
    nudge: bool,
    number: int,
    hang_seconds: float,
    began: tuple[float, float],
) -> None:
    """Runs a program as this rank and writes `rank-N.jsonl`: the function that the runner starts in every worker."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank == 0:
        _redirect(str(Path(folder) / "rank-0.out"))
    recorder = FactRecorder()
    recorder.watch_files(*began)
    writer = JsonlWriter(str(Path(folder) / f"rank-{rank}.jsonl"))

    # The driver of a single-process script has its workers end; of them the chunks are known, and no steps.
    has_workers = single_process is not None
    is_worker = has_workers and rank > 0

    def finish(reason: str) -> None:
        if is_worker:
            writer.write("microbatches", found=watch.microbatches)
        else:
            watch.write_rest()
        writer.write("end", step=watch.number, reason=reason, family=watcher.family, portable=portable_form())
        writer.close()

    end_barrier = EndBarrier(folder, rank, () if has_workers else range(world_size), finish)
    modules = ModuleRecorder(writer, in_microbatches=single_process is not None, world_size=world_size)
    watch = StepRecorder(
        writer, Batches(), Metrics(), modules, recorder.facts, end_barrier.end, steps, detail=detail, nudge=nudge
    )
    watcher = StepWatcher(watch, "ddp" if single_process is None else "single-process")
    about = {"family": watcher.family, "logical": logical is not None, "threads": torch.get_num_threads()}
    writer.write("start", rank=rank, world_size=world_size, **about)
    reason = "program"
    # A context that is entered later encloses those before it. So the probe records what the optimizer gets, the
    # recorder of causes what the program did, and an antidote changes a call before either of them.
    with ExitStack() as stack:
        stack.enter_context(_one_of_many_runs(number))
        stack.enter_context(exits_raised())
        stack.enter_context(_watched(watch, None if is_worker else hang_seconds))
        stack.enter_context(observed_by(watcher))
        stack.enter_context(applied(recorder.patches()))
        for cause in CAUSES:
            if cause.key in neutral and cause.neutralise is not None:
                stack.enter_context(cause.neutralise())
        try:
            if single_process is not None:
                run_single_process(kind, target, argv, **single_process)
            elif logical is not None:
                run_logical(kind, target, argv, seed=0, **logical)
            else:
                run_multi_process(kind, target, argv, leaves_seeds=True)
        except WatchedEnough:
            reason = "steps"
        finally:
            if reason == "program":
                end_barrier.mark()
            finish(reason)


@contextmanager
def _one_of_many_runs(number: int) -> Iterator[None]:
    """Gives this run's process groups their own keys in the store, which outlives it; refuses to start ranks."""

    def connect(inner: Any, *args: Any, **kwargs: Any) -> dist.Store:
        return dist.PrefixStore(f"run-{number}", inner(*args, **kwargs))

    def refuse(inner: Any, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "the program starts its ranks itself, by torch.multiprocessing.spawn; verify does that: let it call its "
            'function once, with int(os.environ["RANK"]), if RANK is set, as under torchrun'
        )

    # import_module: the packages have functions of the same names as these modules
    wraps = [Wrap(importlib.import_module("torch.multiprocessing.spawn"), "start_processes", refuse)]
    if dist.is_available():
        rendezvous = importlib.import_module("torch.distributed.rendezvous")
        wraps.append(Wrap(rendezvous, "_create_c10d_store", connect))
    with wrapped(*wraps):
        yield


@contextmanager
def _watched(watch: StepRecorder, hang_seconds: float | None) -> Iterator[None]:
    """A context in which everything but `samestep.Run`'s steps is hooked in; between steps it kills a hung process.

    Without `hang_seconds` that is left to the driver, which then waits for this worker in vain.
    """

    def watch_hang() -> None:
        if hang_seconds is not None:
            faulthandler.dump_traceback_later(hang_seconds, exit=True)

    def after(optimizer: Any, *_: Any) -> None:
        watch_hang()
        watch.after(optimizer)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(with_gradients(watch.before)).remove)
        stack.callback(register_optimizer_step_post_hook(after).remove)
        wraps = [*_wraps(watch), *watch.batches.wraps(), *watch.metrics.wraps()]
        wraps += [] if watch.detail is None else [watch.modules.wrap()]
        stack.enter_context(applied(patches_for(wraps)))
        watch_hang()
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


def _wraps(watch: StepRecorder) -> list[Wrap]:
    """Wraps that record losses, the coarsest type, and the chunks and inputs of wrapped forwards.

    The workers of a single-process script learn from its driver's flags which step is recorded in detail.
    """
    in_backward = False

    def backward(inner: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal in_backward
        if in_backward or watch.in_train_step:
            return inner(tensors, *args, **kwargs)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            roots = [tensor for tensor in leaves(tensors) if isinstance(tensor, Tensor)]
            watch.losses += [float(root.detach().double().sum()) for root in roots if not root.is_complex()]
            watch.batches.mark_trained()
            watch.metrics.in_exchange = True
        in_backward = True
        try:
            return inner(tensors, *args, **kwargs)
        finally:
            in_backward = False

    def enter(inner: Any, this: Any) -> Any:
        if this._enabled:
            watch.epsilon = max(watch.epsilon, EPSILONS.get(this.fast_dtype, 0.0))
        return inner(this)

    @contextmanager
    def chunk(inner: Any, script: ScriptState, number: int) -> Iterator[None]:
        watch.microbatches.append([script.num_forwards, number])
        with watch.modules.in_chunk(number), inner(script, number):
            yield

    def check_again(inner: Any, *args: Any) -> None:
        # What the driver computes a second time is no part of the run.
        before = watch.microbatches, watch.modules.step
        watch.microbatches, watch.modules.step = [], None
        try:
            inner(*args)
        finally:
            watch.microbatches, watch.modules.step = before

    def flags_now(inner: Any, *args: Any) -> dict[str, Any]:
        return {**inner(*args), "detail": watch.modules.step}

    def set_flags(inner: Any, values: dict[str, Any], *args: Any) -> None:
        watch.modules.step = values["detail"]
        inner(values, *args)

    def chunked_forward(inner: Any, script: ScriptState, module: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        if not script.in_chunk and torch.is_grad_enabled():
            with torch._C.DisableTorchFunction(), torch.no_grad():
                tensors = [leaf for leaf in leaves([*args, *kwargs.values()]) if isinstance(leaf, Tensor)]
                watch.inputs += [bits(tensor) for tensor in tensors]
                dim = options.get("dim", 0)
                watch.num_rows += next((tensor.shape[dim] for tensor in tensors if tensor.ndim > dim), 0)
        return inner(script, module, args, kwargs, **options)

    return [
        Wrap(torch.autograd, "backward", backward),
        Wrap(autocast, "__enter__", enter),
        Wrap(ScriptState, "chunk", chunk),
        Wrap(forward, "chunked_forward", chunked_forward, (data_parallel.__name__,)),
        Wrap(shared_forward, "_check_again", check_again),
        Wrap(flags, "flags_now", flags_now, (driver.__name__,)),
        Wrap(flags, "set_flags", set_flags, (serve.__name__,)),
    ]


class StepWatcher(StepObserver):
    """Records a step of `samestep.Run` as one, whatever optimizers step in it; `family` is "api" from the first on."""

    def __init__(self, watch: StepRecorder, family: str) -> None:
        self.family = family
        self._watch = watch
        self._stream = 0
        self._samples: dict[str, Any] = {}

    def on_step(self, step: TrainStep, batch: Any) -> None:
        """Records the samples; ends the program if enough steps were recorded."""
        watch = self._watch
        self.family, watch.modules.in_microbatches, watch.in_train_step = "api", True, True
        self._stream, watch.sharded = step.config.stream, ShardedParameters.of(step)
        watch.end_if_done()
        with torch._C.DisableTorchFunction():
            self._samples = describe([])
            if isinstance(batch, Batch) and batch.ids is not None:
                self._samples["ids"] = [int(number) for number in batch.ids()]
            if not isinstance(batch, Batch):
                watch.inputs.append(checksum(batch))

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """Records which microbatches this rank runs."""
        self._watch.microbatches.append([self._stream, index])
        self._watch.modules.microbatch = index

    def on_update(self, step: TrainStep, result: StepResult) -> None:
        """Writes the step down."""
        self._watch.losses = [result.loss]
        try:
            self._watch.finish([step.model], {**self._samples, "num_samples": result.num_samples})
        finally:
            self._end()

    def on_failure(self, error: BaseException) -> None:
        """The steps that follow may be the program's own."""
        self._end()

    def _end(self) -> None:
        self._watch.in_train_step, self._watch.sharded = False, None
        self._watch.modules.microbatch = -1


def _redirect(path: str) -> None:
    """Sends the output of this process to a file: the terminal shows the verdict."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
