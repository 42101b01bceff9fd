"""A shared call in the script's graph, and its derivatives, shared out over this process and the workers.

The script's graph has one node a call, `SharedCall`, from what entered to the results. The graphs of the chunks stay on
the processes that have computed them, under the call's number, until the node is freed.

A backward that is recorded (`create_graph=True`) makes a call too: given are the gradients of the results and what
entered the first call, and its results are the gradients of the latter. Its node is a `SharedCall` again, and so on:
nothing here depends on the order of a derivative.

Whatever fails, on whichever process: all take part in the sums, all workers answer, and the error is raised after that.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from samestep.errors import DeterminismError
from samestep.scripts import output
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.calls import Call, Derivative, differentiate, make_sums, summed, with_likes
from samestep.scripts.split_forward.driver import Answers, Driver, changes_what_it_reads, other_bits
from samestep.scripts.split_forward.pieces import Item
from samestep.scripts.workers.image import Image
from samestep.scripts.workers.link import Link, decode, encode, laid_flat, whole_messages
from samestep.scripts.workers.pickling import raise_again, unpacked_error


@dataclass
class Node:
    """A call as a node of the script's graph."""

    script: ScriptState
    number: int
    inputs: tuple[Item, ...]
    results: tuple[Item, ...]
    tracked: frozenset[int]  # results that require gradients
    ranges: tuple[range, ...]
    guard: Callable[[], Callable[[], None]]
    image: Image  # of the module
    is_careful: bool = False
    values: list[Tensor | None] = field(default_factory=list)  # of the results, until the node is made


class SharedCall(torch.autograd.Function):
    """A call, from what entered to its results; its derivative is another."""

    @staticmethod
    def forward(ctx: Any, node: Node, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.node = node
        # None for results that the loss does not use: by zeros, parameters of these alone would get a gradient.
        ctx.set_materialize_grads(False)
        # Not for this backward, whose chunks have what they need, but as arguments of the node of a recorded one.
        ctx.save_for_backward(*inputs)
        # A node that kept its results would be a cycle: they would be there until Python looks for cycles.
        values, node.values = tuple(node.values), []
        rest = [value for k, value in enumerate(values) if value is not None and k not in node.tracked]
        ctx.mark_non_differentiable(*rest)
        # The chunks' graphs, here and on the workers, live as long as the script's graph does.
        weakref.finalize(ctx, node.script.driver.release, node.number)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        node: Node = ctx.node
        given = [k for k, gradient in enumerate(gradients) if gradient is not None]
        seeds = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * (1 + len(node.inputs))
        with whole_messages(in_backward=True), torch._C.DisableTorchFunction():
            # Autograd runs a backward with gradients on if `create_graph` is given.
            has_derivative = torch.is_grad_enabled()
            made = _differentiate(node, given, seeds, has_derivative)
            if not has_derivative:
                return (None, *made.values)
            return (None, *SharedCall.apply(made, *seeds, *ctx.saved_tensors))  # type: ignore[no-untyped-call]


def _differentiate(node: Node, given: Sequence[int], gradients: Sequence[Tensor], has_derivative: bool) -> Node:
    """The derivative of a call, on this process and the workers."""
    script, driver = node.script, node.script.driver
    link: Link = driver.link
    if not script.is_own_thread():
        raise DeterminismError(
            f"backward was called on the thread {threading.current_thread().name}; the devices can meet only on the "
            "script's main thread: call it there"
        )
    call = driver.calls[node.number]
    call.has_derivative |= has_derivative
    again = driver.again.get(node.number, {}) if node.is_careful else {}
    task = Derivative(
        call=node.number,
        number=driver.new_number() if has_derivative else None,
        given=tuple(given),
        items=tuple(replace(node.results[k], like=None) for k in given),
        ranges=node.ranges,
        # A derivative's graph runs through its call's graph, which the same backward may need again.
        keeps=call.has_derivative or torch._C._autograd._get_current_graph_task_keep_graph(),
        is_careful=bool(again),
        is_watched=node.is_careful,
    )
    # The forms that the sums take are not sent: every process makes them, on its own device.
    own = replace(task, items=with_likes(task.items, script.communicator.device))
    sums = make_sums(link.communicator, call.items, node.ranges)
    error: BaseException | None = None
    made, rows, said = Call({}, ()), list[list[Tensor | None]](), list[tuple[int, int, Any]]()
    # The script may have changed something since the forward.
    before = {what for what, _ in node.image.written()} if node.is_careful else set()
    # Before the own chunks: the workers compute theirs meanwhile.
    if link.world_size > 1:
        _send_gradients(driver, task, gradients)
    try:
        mine = node.ranges[0]
        captures = said if link.world_size > 1 else None
        made, rows, _ = differentiate(script, call, own, mine, _cut(task, gradients, mine), sums, node.guard, captures)
        if node.is_careful and (found := {what for what, _ in node.image.written()} - before - {""}):
            raise changes_what_it_reads("backward", f"{min(found)}, to which its code refers")
    except BaseException as raised:  # an interrupt too: the workers wait for the sums; some may be zero
        error = raised
    with link.whole():
        used, totals = summed(sums)
        answers = [decode(each) for each in link.answers()]
    for head, _ in answers:
        said += head["said"]
    output.replay([(stream, text) for _, stream, text in said])
    error = _take_gradients(answers, rows, error, node.image)
    if error is None:
        error = _compared_gradients(node, own, again, gradients, answers)
    if error is not None:
        # The workers may hold the call that failed here, and no node will release it.
        if task.number is not None:
            driver.released.append(task.number)
        raise_again(error)
    flags = zip(used, *(head["used"] for head, _ in answers), strict=True)
    values = _gradients_of_inputs(call.items, totals, map(any, flags), rows)
    if has_derivative:
        made.has_derivative = True
        driver.calls[task.number or 0] = made
    tracked = frozenset(k for k, value in enumerate(values) if value is not None)
    return Node(
        *(script, task.number or 0, made.items, call.items, tracked, node.ranges, node.guard, node.image), values=values
    )


def _cut(task: Derivative, gradients: Sequence[Tensor], mine: Sequence[int]) -> list[list[Tensor]]:
    """The pieces of each gradient of the results, by chunk."""
    return [[item.piece(g, k) for k in mine] for item, g in zip(task.items, gradients, strict=True)]


def _send_gradients(driver: Driver, task: Derivative, gradients: Sequence[Tensor]) -> None:
    """Tells the workers of a derivative; what every chunk gets whole is sent once."""
    pairs = list(zip(task.items, gradients, strict=True))
    # With their strides, by which a kernel chooses in which order it adds.
    flat = [laid_flat(g.detach()) for item, g in pairs if item.kind == "copied"]
    forms = [(len(each), stride, each.is_cpu) for each, stride in flat]
    cut = [(item, g) for item, g in pairs if item.kind != "copied"]
    parts = [encode(None, [i.piece(g, k, copies=False) for i, g in cut for k in mine]) for mine in task.ranges[1:]]
    what = ("derivative", task, forms, driver.new_flags(), driver.unneeded())
    driver.link.send(encode(what), parts, [each for each, _ in flat])


def _take_gradients(
    answers: Answers, rows: Sequence[list[Tensor | None]], error: BaseException | None, image: Image
) -> BaseException | None:
    """Adds the workers' gradients of what was cut to the rows of this process; returns the first error, if any."""
    # By rank, so by chunk: a row begins with the own pieces.
    for head, tensors in answers:
        if head["error"] is not None:
            error = error or unpacked_error(head["error"], image.classes)
        elif error is None:
            rest = iter(tensors)
            for row, is_there in zip(rows, head["present"], strict=True):
                row += [next(rest) if each else None for each in is_there]
    return error


def _compared_gradients(
    node: Node, task: Derivative, again: dict[int, Call], gradients: Sequence[Tensor], answers: Answers
) -> BaseException | None:
    """Differentiates the chunks that were computed again here too; the error if a worker has other bits."""
    # The graph is kept for another backward; one that is recorded has other operations, as of SiLU and GroupNorm.
    once_more = replace(task, keeps=True)
    error: BaseException | None = None
    for chunk, call in again.items():
        rank = next(rank for rank, mine in enumerate(node.ranges) if chunk in mine)
        answered = answers[rank - 1][0]["checksums"][chunk - node.ranges[rank].start]
        pieces = _cut(task, gradients, [chunk])
        with output.silenced():
            _, _, checksums = differentiate(node.script, call, once_more, [chunk], pieces, None, node.guard)
        if checksums != [answered]:
            error = error or other_bits(f"the backward of chunk {chunk}")
    return error


def _gradients_of_inputs(
    items: Sequence[Item],
    totals: Iterable[Tensor],
    are_used: Iterable[bool],
    rows: Iterable[Sequence[Tensor | None]],
) -> list[Tensor | None]:
    """The gradient of each input: a sum over the chunks, or pieces joined; None for those that no chunk has used."""
    values: list[Tensor | None] = [None] * len(items)
    copied = [k for k, item in enumerate(items) if item.kind == "copied"]
    for k, total, is_used in zip(copied, totals, are_used, strict=True):
        # Not by whether a sum is zero: a gradient of zeros is one, and None is none, also for the optimizer.
        if is_used:
            values[k] = total.to_sparse(1) if items[k].is_sparse else total
    cut = [k for k, item in enumerate(items) if item.kind != "copied"]
    for k, row in zip(cut, rows, strict=True):
        if any(piece is not None for piece in row):
            values[k] = _filled(items[k], row)
    return values


def _filled(item: Item, row: Sequence[Tensor | None]) -> Tensor:
    """The whole of pieces; pieces that are None are zero."""
    zero = next(piece for piece in row if piece is not None)
    return item.joined(
        [
            (zero.new_zeros(item.piece_shape(chunk)) if piece is None else piece).contiguous()
            for chunk, piece in enumerate(row)
        ]
    )
