"""CUDA graphs: forward and backward of a microbatch, captured once for each form of microbatch and replayed.

A microbatch of a small model is hundreds of kernels of a few microseconds each, which Python launches one by one; a
replay launches all of them at once. The microbatch is copied into memory that the graph reads, and its results (the
loss, the count, the gradients, the buffers) lie in memory that the graph writes; they are taken before the next replay.

The update is not captured. It runs once a step and not once a microbatch, a fused optimizer is a handful of kernels,
and its inputs change between steps: sums lie in other memory each time, learning rates are Python numbers.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.data.nested import leaves, map_tensors
from samestep.engine.buffers import BufferMerge
from samestep.engine.forward_backward import ForwardBackward
from samestep.engine.losses import MicrobatchLoss, describe
from samestep.engine.strategy import Layout
from samestep.errors import SamestepError, UsageError

WARM_UPS = 3  # as torch.cuda.make_graphed_callables: libraries load and choose kernels in the first runs
MOST_GRAPHS = 16
LEAVE_OUT = "or leave cuda_graphs out (--no-cuda-graphs)"


@dataclass(frozen=True, slots=True)
class MicrobatchGraph:
    """Forward and backward of the microbatches of one form."""

    replay: Callable[[], object]
    slots: list[Tensor]  # the memory from which a replay reads the microbatch
    loss: MicrobatchLoss  # filled by a replay, as the next two
    gradients: list[Tensor | None]  # of each trainable parameter; None if the microbatch does not use it
    buffers: list[tuple[int, Tensor | None]]  # the index of each buffer that a replay changes, and the tensor there
    constants: list[Tensor]  # kept alive, since a replay reads them too


class MicrobatchGraphs:
    """The graphs of one train step.

    The length of the batch alone decides whether its microbatches run by a graph, so the decision is the same on every
    rank and after a resume: full batches do, a shorter last batch does not.
    """

    def __init__(
        self, length: int, device: torch.device, make_recorder: "Callable[[torch.device], CudaRecorder] | None" = None
    ) -> None:
        self._length = length
        self._device = device
        self._make_recorder = CudaRecorder if make_recorder is None else make_recorder
        self._recorder: CudaRecorder | None = None
        self._graphs: dict[Hashable, MicrobatchGraph] = {}
        self._addresses: list[int] = []
        self._settings: tuple[Hashable, ...] = ()

    def __len__(self) -> int:
        """The number of forms of microbatches that are captured."""
        return len(self._graphs)

    def begin(self, layout: Layout, length: int) -> bool:
        """Starts a step; whether its microbatches run by graphs."""
        if length != self._length:
            return False
        if torch.is_anomaly_enabled():
            raise UsageError(
                "autograd's anomaly mode looks at every gradient while Python runs the backward, which a replayed CUDA "
                f"graph does not: switch it off, {LEAVE_OUT}"
            )
        # A graph reads and writes fixed addresses: parameters or buffers that were moved would be missed.
        addresses = layout.purity.addresses()
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses
        kind = self._device.type
        casts = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._settings = (*layout.purity.modes(), *casts)
        return True

    def run(
        self,
        compute: ForwardBackward,
        layout: Layout,
        value: Any,
        num_samples: int,
        counts: Any,
        is_only: bool,
        seed: int,
    ) -> MicrobatchLoss:
        """The result of `compute.run`, by a graph; the generators are seeded already."""
        inputs = (value,) if counts is None else (value, counts)
        key = form_of(inputs), num_samples, is_only, self._settings
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(compute, layout, inputs, num_samples, is_only, seed)
            compute.generators.seed(seed)  # the capture has drawn
        _fill(graph.slots, inputs)
        # Random numbers are those of a microbatch without a graph. A generator counts its draws: while a graph is
        # captured, kernels get the offset of their draws in the graph, and two cells from which they read seed and
        # offset when they run; a replay first writes the generator's to these cells (PyTorch, CUDAGeneratorImpl.cpp,
        # `capture_prologue` and `replay_prologue`). So seeding before every replay is sufficient.
        graph.replay()
        for parameter, gradient in zip(layout.gradients.parameters, graph.gradients, strict=True):
            parameter.grad = gradient
        _buffers(layout).leave(graph.buffers)
        return graph.loss

    def drop(self) -> None:
        """Forgets all graphs, and frees their memory."""
        self._graphs.clear()
        self._recorder = None

    def _capture(
        self,
        compute: ForwardBackward,
        layout: Layout,
        inputs: tuple[Any, ...],
        num_samples: int,
        is_only: bool,
        seed: int,
    ) -> MicrobatchGraph:
        """Warms up and captures a microbatch; undoes the effects of both."""
        if len(self._graphs) >= MOST_GRAPHS:
            raise UsageError(
                f"the microbatches came in more than {MOST_GRAPHS} forms (sizes, dtypes, training modes), and each is "
                f"a CUDA graph with a gradient of its own: pad to a few sizes, {LEAVE_OUT}"
            )
        recorder = self._recorder = self._recorder or self._make_recorder(self._device)
        value, *counts = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        slots = leaves([value, *counts])

        def forward_backward() -> MicrobatchLoss:
            given = counts[0] if counts else None
            loss = compute.run(layout.gradients.inputs, value, num_samples, given, is_only)
            return MicrobatchLoss(loss.value.detach(), loss.weight, loss.count)  # without the autograd graph

        torch.clear_autocast_cache()  # the script's own autocast may hold weights that were cast before
        try:
            for _ in range(WARM_UPS):
                self._warm_up(recorder, compute, layout, forward_backward, seed)
                _fill(slots, inputs)  # a loss may write to its microbatch
            compute.generators.seed(seed)
            replay, loss = recorder.record(forward_backward)
            gradients = [parameter.grad for parameter in layout.gradients.parameters]
            buffers = _buffers(layout).left()
        finally:
            torch.clear_autocast_cache()
            _undo(layout)
        return MicrobatchGraph(replay, slots, loss, gradients, buffers, compute.constants())

    def _warm_up(
        self,
        recorder: "CudaRecorder",
        compute: ForwardBackward,
        layout: Layout,
        run: Callable[[], MicrobatchLoss],
        seed: int,
    ) -> None:
        """One run whose effects are undone; refuses draws on the host, which a replay would not repeat."""
        compute.generators.seed(seed)
        before = compute.generators.states_off_device()
        recorder.warm_up(run)
        layout.purity.check()
        _undo(layout)
        if compute.generators.states_off_device() != before:
            raise UsageError(
                "forward or loss draws random numbers on the host (torch's CPU generator, NumPy or Python's random), "
                "and a CUDA graph would repeat those of its capture: draw them on the device (torch.rand(…, "
                f"device=x.device)) or in the dataset, {LEAVE_OUT}"
            )


class CudaRecorder:
    """Captures CUDA graphs, on a stream of their own, all in one pool of memory."""

    # Graphs may share a pool if the results of one are taken before another is replayed (PyTorch, notes on CUDA
    # semantics, "Graph memory management").

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], MicrobatchLoss]) -> None:
        """Runs it on the stream of the captures, where libraries allocate their workspaces."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                run()
        finally:
            current.wait_stream(self._stream)

    def record(self, run: Callable[[], MicrobatchLoss]) -> tuple[Callable[[], object], MicrobatchLoss]:
        """Captures it; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream if the end of a capture fails, before which the inner one stops.
            # `thread_local`: the threads of a DataLoader pin memory meanwhile, which would else fail the capture.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                loss = run()
        except RuntimeError as error:
            failure = error
        else:
            return graph.replay, loss
        raise explain_capture(failure)


def check_graphs(device: torch.device) -> None:
    """Raises a `UsageError` unless the device has CUDA graphs."""
    if device.type != "cuda":
        raise UsageError(
            f"got cuda_graphs=True on {device}: only CUDA devices have graphs; leave it out (--no-cuda-graphs)"
        )


def form_of(value: Any) -> Hashable:
    """The form of a microbatch, for which one graph is captured: structure, shapes, strides and dtypes."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value.shape, value.stride(), value.dtype
    if isinstance(value, Mapping):
        return type(value), tuple((key, form_of(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(form_of, value))
    what = "a sparse tensor" if isinstance(value, Tensor) else describe(value)
    raise UsageError(
        f"got {what} in a batch; with cuda_graphs a batch is made of dense tensors alone, in dicts, lists and tuples, "
        f"since a graph would repeat what it was captured with: make it a tensor, {LEAVE_OUT}"
    )


def explain_capture(error: BaseException) -> BaseException:
    """The error to raise for a capture that failed."""
    from samestep.engine.diagnosis import is_out_of_memory

    # The end of a failed capture raises too, and hides the cause, which is found in the context.
    chain = [error]
    while chain[-1].__context__ is not None and chain[-1].__context__ not in chain:
        chain.append(chain[-1].__context__)
    for cause in chain:
        if isinstance(cause, SamestepError) or is_out_of_memory(cause):
            return cause
    reason = str(chain[-1]).partition("\n")[0]
    explained = UsageError(
        f"forward, loss or backward cannot be captured as a CUDA graph ({reason}): keep values on the device, so no "
        ".item(), .tolist(), .cpu() or print of a tensor, no `if` on one, no mask that selects a varying number (use "
        "torch.where), no tensor made from host data, no generators of their own, no checkpoint that preserves the "
        f"random state; {LEAVE_OUT}"
    )
    explained.__cause__ = chain[-1]  # its traceback shows the line
    return explained


@torch.no_grad()
def _fill(slots: list[Tensor], inputs: Any) -> None:
    """Copies a microbatch into the memory that a graph reads."""
    # One launch for the whole microbatch.
    torch._foreach_copy_(slots, leaves(inputs))


def _undo(layout: Layout) -> None:
    """Undoes the effects of a run of a microbatch on the model."""
    layout.gradients.forget()
    layout.buffers.abandon()
    layout.purity.restore_modes()


def _buffers(layout: Layout) -> BufferMerge:
    assert isinstance(layout.buffers, BufferMerge), "the model is whole"
    return layout.buffers
