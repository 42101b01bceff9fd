"""The queue of a process group's operations: run one at a time, in the order in which they were called."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.exceptions import packed, unpacked
from samestep.launcher.device_token import lent_token

NO_TIMEOUT = timedelta(0)
POLL_SECONDS = 0.001
DROPPED_WORKS = 64  # more than a step has
JOIN_SECONDS = 5.0


class QueuedWork(dist.Work):
    """An operation of a queue: `torch.distributed` waits for it, or asks for its future."""

    def __init__(self, queue: "WorkQueue", run: Callable[[], Any], outputs: Any, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._queue = queue
        self._run = run
        self._outputs = outputs
        self._lock = threading.Lock()
        self._end: torch.futures.Future[Any]
        self._future: torch.futures.Future[Any] | None = None
        # Packed, as all errors that a group keeps: frames of a traceback refer to works and groups that C++ has too,
        # and Python's collector does not see through that circle.
        self._error: bytes | None = None
        self._is_done = self._is_future_complete = False
        self.is_published = self.is_handed_out = False
        with torch._C.DisableTorchFunction():  # by their memory: simulated GPUs are the host's
            self._tensors = [tensor for tensor in tensors if tensor.is_cuda]
        self._devices = sorted({tensor.device for tensor in self._tensors}, key=str) if self._tensors else []
        # The streams on which the caller's kernels write the tensors, up to now.
        self._before = [torch.cuda.current_stream(device).record_event() for device in self._devices]
        self._after: list[torch.cuda.Event] = []

    def holding(self, outputs: Sequence[Tensor]) -> "QueuedWork":
        """This work, not yet handed out, with these as the tensors that it writes: those above are their parts."""
        self._outputs = list(outputs)
        return self

    def __del__(self) -> None:
        # C++ may have it, and ask for its future later, but does not keep what Python has added to it alive: `join` of
        # DistributedDataParallel has the number of ranks that are present so. No more is kept, since tensors are large.
        if self.is_handed_out and self._error is None and [tensor.numel() for tensor in self._outputs] == [1]:
            self._queue.dropped.append(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits until the operation is done; on CUDA, the current stream waits for its copies, too."""
        self._queue.complete(self, timeout.total_seconds())
        if self._error is not None:
            raise unpacked(self._error)
        for device, event in zip(self._devices, self._after, strict=True):
            torch.cuda.current_stream(device).wait_event(event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        return None if self._error is None else unpacked(self._error)

    def result(self) -> list[Tensor]:
        """The tensors that it has written."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> "torch.futures.Future[Any]":
        """The future of the tensors that it writes."""
        with self._lock:
            if self._future is None:
                self._end = torch.futures.Future(devices=[*self._devices] or None)
                # An error must come from a callback: `set_exception` sets a value that only Python knows as an error,
                # and DistributedDataParallel, which reads it in C++, would crash.
                self._future = self._end.then(self._result_or_error)
            future = self._future
        if self._is_done:
            self._complete_future()
        return future

    def execute(self) -> None:
        """Runs the operation, whose turn has come, and publishes what came of it."""
        try:
            with torch._C.DisableTorchFunction(), ExitStack() as context:
                for kind in ("cpu", "cuda"):  # the caller's autocast is for its model: `cat` refuses dtypes under it
                    if torch.is_autocast_enabled(kind):
                        context.enter_context(torch.autocast(kind, enabled=False))
                if torch.is_inference_mode_enabled():  # nor may it be for memory that a later operation writes
                    context.enter_context(torch.inference_mode(False))
                self._enter_streams(context)
                for tensor in self._tensors:  # torch would reuse their memory as soon as the caller's stream is done
                    tensor.record_stream(self._queue.stream(tensor.device))
                self._run()
                self._after = [torch.cuda.current_stream(device).record_event() for device in self._devices]
        except Exception as error:
            self._error = packed(error)
        except BaseException as stop:
            # Whoever keeps it must not keep, with the frames that it has passed, what the transport has mapped there.
            self._error, stop.__context__ = packed(dist.DistBackendError(f"interrupted by {stop!r}")), None
            raise stop.with_traceback(None) from None
        finally:  # also of one that was interrupted: others wait for it
            self._is_done = True
            self.publish()

    def publish(self) -> None:
        """Completes the future, whose callbacks may call further operations; ends the turn."""
        # What it refers to must not outlive it: tensors, above all.
        self._run = _nothing
        self._complete_future()
        self.is_published = True

    def fail(self, error: bytes) -> None:
        """Ends an operation that will not run, with a packed error."""
        self._error, self._is_done = error, True
        self.publish()

    def _complete_future(self) -> None:
        """Completes the future, once: the thread that asks for it and the one that has run the operation may meet."""
        with self._lock:
            if self._future is None or self._is_future_complete:
                return
            self._is_future_complete = True
        with ExitStack() as context:
            self._enter_streams(context)
            self._end.set_result([] if self._error is not None else self._outputs)

    def _result_or_error(self, _: "torch.futures.Future[Any]") -> Any:
        if self._error is not None:
            raise unpacked(self._error)
        return self._outputs

    def _enter_streams(self, context: ExitStack) -> None:
        """Makes the queue's streams the current ones; they wait for the caller's."""
        for device, event in zip(self._devices, self._before, strict=True):
            stream = self._queue.stream(device)
            stream.wait_event(event)
            context.enter_context(torch.cuda.stream(stream))


class WorkQueue:
    """The operations of one process group, of one rank."""

    # A synchronous operation runs in the thread that calls it, after those before it; a thread of the queue runs the
    # asynchronous ones. A thread that waits for an operation which has not begun runs it by itself, and what is before
    # it: another thread would have to be woken first.
    #
    # An operation's turn ends when the callbacks of its future have run, and an operation that one of them calls runs
    # within it, at once: else its place among other threads' operations would be another one on every rank.

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[QueuedWork] = deque()
        self._turn = threading.RLock()
        self._in_turn: int | None = None  # the thread that has the turn
        self._calls = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._closed: bytes | None = None
        self.dropped: deque[QueuedWork] = deque(maxlen=DROPPED_WORKS)

    def submit(self, run: Callable[[], Any], outputs: Any, tensors: Sequence[Tensor], is_async: bool) -> QueuedWork:
        """Queues an operation; a synchronous one is done when this returns, or raises its error."""
        work = QueuedWork(self, run, outputs, tensors)
        if self._closed is not None:
            work.fail(self._closed)
        elif self._in_turn == threading.get_ident():
            work.execute()  # called by a callback
        else:
            self._waiting.append(work)
        if not is_async:
            work.wait()
        elif not work.is_published:
            self._start()
            self._calls.release()
        work.is_handed_out = is_async
        return work

    def complete(self, work: QueuedWork, seconds: float) -> None:
        """Returns once an operation and its callbacks are done; runs it, and those before it, unless a thread does."""
        if work.is_published:
            return
        with lent_token():
            if seconds > 0:  # its own limit: it must not be this thread that is blocked
                self._await(work, seconds)
            while not work.is_completed():
                self._run_next(work)
            with self._turn:  # in which another thread may run the callbacks
                pass

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def synchronize(self) -> None:
        """Waits until the GPUs are done with the operations that were run."""
        for stream in self._streams.values():
            stream.synchronize()

    def drain(self) -> None:
        """Runs all operations that were called."""
        while self._waiting:
            self._run_next()

    def close(self, error: Exception) -> None:
        """Ends the thread; operations that have not begun, and later ones, fail with this error."""
        self._closed = packed(error)
        self.dropped.clear()
        while self._waiting:
            self._waiting.popleft().fail(self._closed)
        self._calls.release()

    def join(self) -> None:
        """Waits until the thread has ended: one that is in torch's code when the interpreter ends would abort it."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _run_next(self, wanted: QueuedWork | None = None) -> None:
        with self._turn:
            # The wanted one may have been run while this thread waited for its turn.
            if not self._waiting or (wanted is not None and wanted.is_completed()):
                return
            work = self._waiting.popleft()
            outer, self._in_turn = self._in_turn, threading.get_ident()
            try:
                work.execute()
            finally:
                self._in_turn = outer

    def _await(self, work: QueuedWork, seconds: float) -> None:
        self._start()
        self._calls.release()
        deadline = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"an operation of {self._name} was not done within {seconds:g} s")
            time.sleep(POLL_SECONDS)

    def _start(self) -> None:
        if self._thread is None:
            # Daemonic: a group that is never destroyed must not keep the program alive.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            self._calls.acquire()
            if self._closed is not None:
                return
            self._run_next()


def _nothing() -> None:
    """The run of an operation that has run."""
