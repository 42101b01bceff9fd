"""A worker: computes the chunks that the driver tells it to, until the driver ends.

One message, one answer. While a message is being received an error ends this process, since the driver goes on sending
what it has begun; from then on an error is the answer. In a backward the sums over all processes come before the answer
and take place whatever has failed. Between two messages a worker holds the modules' copies, and the graphs of the calls
whose nodes the script's graph still has.
"""

import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from traceback import extract_tb, format_list
from typing import Any

import torch
from torch import Tensor

from samestep.callsite import is_script_file
from samestep.errors import PeerLostError
from samestep.scripts import output
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.calls import (
    Call,
    Derivative,
    Forward,
    Split,
    differentiate,
    make_sums,
    name_of,
    run_chunks,
    with_likes,
)
from samestep.scripts.split_forward.chunks import Slot
from samestep.scripts.split_forward.pieces import PieceSums, forms_of
from samestep.scripts.workers.flags import set_flags
from samestep.scripts.workers.image import Copy, bytes_of
from samestep.scripts.workers.link import Link, Received, decode, encode
from samestep.scripts.workers.pickling import packed_error, pickled_answer


class Worker:
    """The state of a worker."""

    def __init__(self, script: ScriptState, link: Link, is_beside: bool) -> None:
        self._script, self._link = script, link
        self._variables = None if is_beside else dict(os.environb)  # on another machine than the driver's
        self._copies: dict[int, tuple[Copy, Split]] = {}
        self._storages: dict[
            int, list[torch.UntypedStorage]
        ] = {}  # of each image, also of one that could not be unpickled
        self._plans: dict[int, tuple[Forward, bytes]] = {}  # of each image: the last forward, and its template
        self._calls: dict[int, tuple[Call, int]] = {}  # with the number of the image
        self._is_inference = False

    def serve(self) -> None:
        """Does what the driver tells, until it ends."""
        is_beside = self._variables is None
        # The driver decides what an interrupt means, and what a stop does: on its machine.
        signal.signal(signal.SIGINT, signal.SIG_IGN if is_beside else signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGHUP) if is_beside else ():
            signal.signal(number, lambda number, _: os._exit(128 + number) if self._link.has_lost() else None)
        try:
            with torch._C.DisableTorchFunction(), output.kept_for_script():  # simulated devices matter to scripts alone
                while True:
                    shared, part = self._link.next_message()
                    (kind, *content), _ = decode(shared)
                    if kind == "end":
                        return
                    answer = self._forward if kind == "forward" else self._derivative
                    answer(content, part)
                    del shared, part, content  # or they would be kept until the next message
        except PeerLostError:
            pass  # the driver's exit code is the run's

    def _forward(self, content: Any, part: Received) -> None:
        head: dict[str, Any] = {
            "said": [],
            "lost": set(),
            "failed_chunk": 0,
            "error": None,
            "num_sums": 0,
            "templates": b"",
        }
        leaves, items = list[Tensor](), partial[Any](tuple)
        (call, *_), _, image, *_ = content
        self._take_storages(content)  # an error in the midst of a message ends this process
        try:
            leaves, items = self._run(head, content, part)
        except BaseException as error:
            copy, _ = self._copies.get(image, (None, None))
            head.update(error=self._packed(error, copy, head["failed_chunk"]), num_sums=0, templates=b"")
        self._link.answer(encode(head, leaves))
        if call in self._calls:
            self._calls[call][0].items = items()  # not needed before, while the driver waits

    def _take_storages(self, content: Any) -> None:
        """Receives the bytes of a module's tensors."""
        _, _, number, sent, stale, _, unneeded = content
        self._drop(*unneeded)
        if sent is not None:
            self._copies.pop(number, None)
            self._storages.pop(number, None)
            # Only now, when the old ones are free: a device need not hold the module twice.
            self._storages[number] = [
                torch.UntypedStorage(size, device="cpu" if is_on_host else self._script.communicator.device)
                for size, is_on_host in sent.sizes
            ]
        self._link.receive([bytes_of(self._storages[number][each]) for each in stale])

    def _run(self, head: dict[str, Any], content: Any, part: Received) -> tuple[list[Tensor], partial[Any]]:
        """Runs this worker's chunks of a forward; returns sums of buffers and the results, and what makes the items."""
        (call, seed, place), plan, number, sent, _, flags, _ = content
        # The driver leaves out the plan that it has sent last for this module.
        task, template = self._plans[number] = plan or self._plans[number]
        task = replace(task, number=call, seed=seed, place=place)
        device = self._script.communicator.device
        mine = task.ranges[self._link.rank]
        head["failed_chunk"], self._script.num_forwards = mine.start, task.place
        self._take(flags)
        if sent is not None:
            copy = Copy(sent, self._storages[number], device, self._script.mark)
            self._copies[number] = copy, Split.of(copy.module, copy.records.generators)
        copy, split = self._copies[number]
        if not split.hold(copy.module):
            split = Split.of(copy.module, copy.records.generators)
            self._copies[number] = copy, split
        try:
            task = replace(task, chunks=replace(task.chunks, template=pickle.loads(template)))
            lists, pieces = decode(part)
            rest = iter(pieces)
            columns = [[next(rest) for _ in mine] if c is None else c for c in pickle.loads(lists)]
            with torch.inference_mode(self._is_inference):
                work = run_chunks(
                    *(self._script, copy.module, split, task, mine, columns), put_back=copy.put_back, captures=True
                )
            head.update(said=work.said, lost=work.lost, failed_chunk=work.failed_chunk)
            if work.error is not None:
                raise work.error
            # Also if no result needs gradients: the driver releases each call by its number.
            if task.records:
                self._calls[task.number] = Call(work.calls, ()), number
            sums, results = split.buffers.sums, work.results
            if mine:
                value = forms_of(results.leaves), results.templates
                is_plain = all(type(template) is Slot for template in results.templates)
                head["templates"] = pickle.dumps(value) if is_plain else pickled_answer(value, copy.classes)
            head["num_sums"] = len(sums)
            leaves = [*sums, *(leaf.detach() for row in results.leaves for leaf in row)]
            return leaves, partial(split.items, task, device)
        finally:
            split.release()

    def _derivative(self, content: Any, part: Received) -> None:
        task: Derivative
        task, forms, flags, unneeded = content
        self._drop(*unneeded)
        wholes = self._wholes(task, forms)
        self._take(flags)
        head: dict[str, Any] = {"error": None, "said": [], "used": [], "present": [], "checksums": []}
        leaves: list[Tensor] = []
        call, image = self._calls[task.call]
        # Outside of what may fail: the other processes wait for this one's part of the sums.
        sums = make_sums(self._link.communicator, call.items, task.ranges)
        try:
            made, cut, head["checksums"] = self._differentiated(call, image, task, wholes, part, sums, head["said"])
            head["present"] = [[piece is not None for piece in column] for column in cut]
            leaves = [piece for column in cut for piece in column if piece is not None]
            if task.number is not None:
                self._calls[task.number] = made, image
        except BaseException as error:
            copy, _ = self._copies.get(image, (None, None))
            head["error"] = self._packed(error, copy, "a backward")
        if sums is not None:
            head["used"] = sums.used
            sums.used = [True] * len(sums.used)
            for _ in sums.totals():  # which the driver needs alone
                pass
        self._link.answer(encode(head, leaves))

    def _wholes(self, task: Derivative, forms: Sequence[tuple[int, tuple[int, ...], bool]]) -> list[Tensor]:
        """Receives the gradients of results that every chunk had whole."""
        items = [item for item in task.items if item.kind == "copied"]
        device = self._script.communicator.device
        flat = [
            torch.empty(length, dtype=item.dtype, device="cpu" if is_on_host else device)
            for item, (length, _, is_on_host) in zip(items, forms, strict=True)
        ]
        self._link.receive(flat)
        rows = zip(items, forms, flat, strict=True)
        return [each.as_strided(item.shape, stride) for item, (_, stride, _), each in rows]

    def _differentiated(
        self,
        call: Call,
        image: int,
        task: Derivative,
        wholes: Sequence[Tensor],
        part: Received,
        sums: PieceSums | None,
        said: list[tuple[int, int, Any]],
    ) -> tuple[Call, list[list[Tensor | None]], list[int]]:
        mine = task.ranges[self._link.rank]
        given, pieces = iter(wholes), iter(decode(part)[1])
        columns = []
        for item in task.items:
            if item.kind == "copied":
                whole = next(given)
                columns.append([item.piece(whole, k) for k in mine])
            else:
                columns.append([next(pieces) for _ in mine])
        task = replace(task, items=with_likes(task.items, self._script.communicator.device))
        # The copy may be gone, or another, since the forward: the graph is all that a backward needs, and there are no
        # buffers to guard.
        copy, split = self._copies.get(image, (None, None))
        if copy is None or split is None or not split.hold(copy.module):
            return differentiate(self._script, call, task, mine, columns, sums, lambda: lambda: None, said)
        guard = split.buffers.guard([child for _, child in split.replicas.modules])
        try:
            return differentiate(self._script, call, task, mine, columns, sums, guard, said)
        finally:
            split.release()

    def _packed(self, error: BaseException, copy: Copy | None, where: int | str) -> tuple[bytes, bytes]:
        """An error for the driver, with the script's lines that have failed here."""
        where = where if isinstance(where, str) else f"chunk {where}"
        lines = [line for line in extract_tb(error.__traceback__) if is_script_file(line.filename)]
        error.add_note(
            f"the worker on {name_of(self._script)} raised it in {where}:\n{''.join(format_list(lines))}".rstrip()
        )
        return packed_error(error, copy.classes if copy else ())

    def _take(self, flags: dict[str, Any] | None) -> None:
        torch.clear_autocast_cache()  # the script's context never ends here: casts of old weights would stay
        if flags is not None:
            set_flags(flags, self._variables)
            self._is_inference = flags["inference"]

    def _drop(self, calls: list[int], images: list[int]) -> None:
        for number in calls:
            self._calls.pop(number, None)
        for number in images:
            self._copies.pop(number, None)
            self._storages.pop(number, None)
            self._plans.pop(number, None)
