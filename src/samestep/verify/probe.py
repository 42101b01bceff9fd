"""The probe: runs a program in a worker and writes down what it computes, step by step, without changing a number.

What the causes' side hands in, and when it is used here (see `samestep.verify.causes`):

- `table.Recorder(rank, world_size)` is made once a worker. Its `patches()` are built and applied after the probe's
  own and before the program is imported, so that they wrap what they find. After every step the probe calls
  `facts()`, which returns what is new since the last call: a list of JSON objects with a "name"; each becomes a line
  {"kind": "fact", "step": number of the step that comes next, **fact}. It is called once more at the end.
- For every key in `neutral`, `Cause.neutralise()` is entered after the recorder's patches, before the program and
  before adoption, on every rank.
- `evidence.Evidence.from_records(recordings)` gets `Recording`s (`samestep.verify.recording`): those of all device
  counts and attempts of one question.
"""

import faulthandler
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.data.batch import Batch, checksum
from samestep.data.nested import leaves
from samestep.engine.observer import StepObserver, observed_by
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import UsageError
from samestep.scripts import parallel
from samestep.scripts.adoption import Adoption
from samestep.scripts.patch import Patch, applied
from samestep.scripts.script import run_adopted
from samestep.scripts.spawning import run_native
from samestep.scripts.wrapped import forward
from samestep.verify.causes.table import CAUSES, Recorder
from samestep.verify.watching.batches import Batches, describe
from samestep.verify.watching.ending import Ending, WatchedEnough
from samestep.verify.watching.jsonl_writer import JsonlWriter
from samestep.verify.watching.metrics import Metrics
from samestep.verify.watching.modules import Modules
from samestep.verify.watching.parts import parts_of
from samestep.verify.watching.steps import EPSILONS, Steps, with_gradients
from samestep.verify.watching.tensor_summary import bits

HANG_SECONDS = 300.0


def run_probed(
    kind: str,
    target: str,
    argv: Sequence[str],
    adopt: Mapping[str, Any] | None,
    folder: str,
    steps: int,
    detail: int | None = None,
    neutral: Sequence[str] = (),
    nudge: bool = False,
    question: int = 0,
    hang_seconds: float = HANG_SECONDS,
) -> None:
    """Runs a program as this rank and writes `rank-N.jsonl`: what `samestep verify` starts in every worker."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(question)
    if rank == 0:
        _redirect(str(Path(folder) / "rank-0.out"))
    recorder = Recorder(rank, world_size)
    writer = JsonlWriter(str(Path(folder) / f"rank-{rank}.jsonl"))
    ending = Ending(folder, rank, world_size, writer)
    modules = Modules(writer, in_microbatches=adopt is not None, world_size=world_size)
    watch = Steps(writer, Batches(), Metrics(), modules, recorder, ending, steps, detail=detail, nudge=nudge)
    family = ["ddp" if adopt is None else "adopted"]
    writer.write("start", rank=rank, world_size=world_size, family=family[0], threads=torch.get_num_threads())
    reason = "program"
    with ExitStack() as stack:
        stack.enter_context(applied([*_own_store(question), _no_spawning()]))
        stack.enter_context(_watched(watch, family, hang_seconds))
        stack.enter_context(applied(recorder.patches()))
        for cause in CAUSES:
            if cause.key in neutral:
                stack.enter_context(cause.neutralise())
        try:
            _run(kind, target, argv, adopt)
        except WatchedEnough:
            reason = "steps"
        finally:
            if reason == "program":
                ending.mark()
            watch.write_rest()
            writer.write("end", step=watch.number, reason=reason, family=family[0])
            writer.close()


def _own_store(question: int) -> list[Patch]:
    """Gives this run's process groups keys of their own in the store, which outlives it."""
    if not dist.is_available():
        return []
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
    connect = rendezvous._create_c10d_store

    def own(*args: Any, **kwargs: Any) -> dist.Store:
        return dist.PrefixStore(f"run-{question}", connect(*args, **kwargs))

    return [Patch(rendezvous, "_create_c10d_store", own)]


def _no_spawning() -> Patch:
    """Stops programs that start their ranks themselves: those would wait for each other, unwatched."""
    spawning = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of that name

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "the program starts its ranks itself, by torch.multiprocessing.spawn; verify does that: let it call its "
            'function once, with int(os.environ["RANK"]), if RANK is set, as under torchrun'
        )

    return Patch(spawning, "start_processes", refuse)


def _run(kind: str, target: str, argv: Sequence[str], adopt: Mapping[str, Any] | None) -> None:
    """Runs the program as `samestep run` does."""
    if adopt is not None:
        run_adopted(kind, target, argv, **adopt)
    else:
        run_native(kind, target, argv)


@contextmanager
def _watched(watch: Steps, family: list[str], hang_seconds: float) -> Iterator[None]:
    """The time in which everything is hooked in."""
    with ExitStack() as stack:
        for handle in (
            register_optimizer_step_pre_hook(with_gradients(watch.before)),
            register_optimizer_step_post_hook(partial(_after, watch, hang_seconds)),
        ):
            stack.callback(handle.remove)
        places = (_backward, _autocast, _chunks, _wrapped_forwards)
        patches = [patch for place in places for patch in place(watch, family)]
        stack.enter_context(observed_by(StepWatcher(watch, family)))
        stack.enter_context(applied([*patches, *watch.batches.patches(), *watch.metrics.patches()]))
        if watch.detail is not None:
            stack.enter_context(watch.modules.watching())
        faulthandler.dump_traceback_later(hang_seconds, exit=True)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


def _after(watch: Steps, hang_seconds: float, optimizer: Any, *_: Any) -> None:
    """An optimizer has stepped: the program does not hang."""
    faulthandler.dump_traceback_later(hang_seconds, exit=True)
    watch.after(optimizer)


def _backward(watch: Steps, family: list[str]) -> list[Patch]:
    """Notes the roots of backward: the losses of programs that deal with ranks themselves."""
    backward = torch.autograd.backward
    under_way = [False]

    def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if under_way[0] or watch.in_train_step:
            return backward(tensors, *args, **kwargs)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            roots = [tensor for tensor in leaves(tensors) if isinstance(tensor, Tensor)]
            watch.losses += [float(root.detach().double().sum()) for root in roots if not root.is_complex()]
            watch.batches.note_backward()
            watch.metrics.in_exchange = True
        under_way[0] = True
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            under_way[0] = False

    return [Patch(torch.autograd, "backward", noted)]


def _autocast(watch: Steps, family: list[str]) -> list[Patch]:
    """Notes the coarsest type that the program computes with."""
    enter: Callable[[Any], Any] = autocast.__enter__

    def noted(this: Any) -> Any:
        if this._enabled:
            watch.epsilon = max(watch.epsilon, EPSILONS.get(this.fast_dtype, 0.0))
        return enter(this)

    return [Patch(autocast, "__enter__", noted)]


class StepWatcher(StepObserver):
    """Takes a step of `samestep.Run` as one, whatever optimizers step in it.

    Args:
        watch: writes the steps down.
        family: what kind of program it is, in a list of one.
    """

    needs_modules = True

    def __init__(self, watch: Steps, family: list[str]) -> None:
        self._watch = watch
        self._family = family
        self._stream = 0
        self._samples: dict[str, Any] = {}

    def on_step(self, step: TrainStep, batch: Any) -> None:
        """Notes the samples; ends the program when enough was watched."""
        watch = self._watch
        self._family[0], watch.modules.in_microbatches, watch.in_train_step = "api", True, True
        self._stream, watch.parts = step.config.stream, parts_of(step)
        if step.membership.mesh is not None:  # a module there gives a part of its output, or runs on some ranks alone
            watch.is_noted, watch.modules.step = bool(step.membership.mine), None
        if watch.number >= watch.num_wanted:
            watch.ending.end()
        with torch._C.DisableTorchFunction():
            self._samples = _samples_of(batch)
            if not isinstance(batch, Batch):
                watch.inputs.append(checksum(batch))

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """Notes which microbatches this rank runs."""
        if self._watch.is_noted:
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
        """Takes what comes next for the program's own."""
        self._end()

    def _end(self) -> None:
        self._watch.in_train_step, self._watch.is_noted, self._watch.parts = False, True, None
        self._watch.modules.microbatch = -1


def _samples_of(batch: Any) -> dict[str, Any]:
    """Which samples a global batch holds, as far as it tells."""
    if isinstance(batch, Batch) and batch.ids is not None:
        return {"ids": [int(number) for number in batch.ids()], "rows": None}
    return describe([])


def _chunks(watch: Steps, family: list[str]) -> list[Patch]:
    """Notes which chunk of a wrapped forward this rank runs."""
    chunk = Adoption.chunk

    @contextmanager
    def noted_chunk(this: Adoption, number: int) -> Iterator[None]:
        watch.microbatches.append([this.num_forwards, number])
        watch.modules.microbatch = number
        try:
            with chunk(this, number):
                yield
        finally:
            watch.modules.microbatch = -1

    return [Patch(Adoption, "chunk", noted_chunk)]


def _wrapped_forwards(watch: Steps, family: list[str]) -> list[Patch]:
    """Notes what a wrapped forward is given: the same on all ranks, on any number of devices."""
    original = forward.chunked_forward

    def noted(adoption: Adoption, module: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        if not adoption.in_chunk and torch.is_grad_enabled():
            with torch._C.DisableTorchFunction(), torch.no_grad():
                tensors = [leaf for leaf in leaves([*args, *kwargs.values()]) if isinstance(leaf, Tensor)]
                watch.inputs += [bits(tensor) for tensor in tensors]
                dim = options.get("dim", 0)
                watch.num_rows += next((tensor.shape[dim] for tensor in tensors if tensor.ndim > dim), 0)
        return original(adoption, module, args, kwargs, **options)

    return [Patch(parallel, "chunked_forward", noted), Patch(forward, "chunked_forward", noted)]


def _redirect(path: str) -> None:
    """Sends what this process prints to a file: the terminal belongs to the verdict."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
