"""Stage inputs: the values and gradients that stages exchange, and with them the state of the random generators.

On one device a microbatch draws all its randomness from one stream, whichever layer draws. So the state of the
generators travels with the activations, and each stage goes on where the one before it stopped.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from numpy.random import mtrand
from torch import Tensor

from samestep.comm.p2p import PointToPoint, Sent
from samestep.data.randomness import Generators
from samestep.engine.pipelining.schedule import Message, Schedule
from samestep.engine.pipelining.stages import as_tensors

Contents = tuple[Sequence[Tensor | None], Any]


class StageInputs:
    """The messages of one step, between stages of this rank or of two ranks.

    A sent tensor is freed as soon as a message shows that it has arrived: its receiver sent that after it needed ours.
    Else every activation would stay until the end of the step.
    """

    def __init__(self, p2p: PointToPoint, schedule: Schedule) -> None:
        self._p2p = p2p
        self._owners = schedule.owners
        others = [rank for rank in range(p2p.world_size) if rank != p2p.rank]
        self._expected = {source: list(schedule.messages(source, p2p.rank).items())[::-1] for source in others}
        self._needed = {target: schedule.awaited(target) for target in others}
        self._sent: dict[int, list[tuple[int, Sent]]] = {target: [] for target in others}
        self._arrived: dict[Message, Contents] = {}

    def send(self, message: Message, tensors: Sequence[Tensor | None], note: Any) -> None:
        """Sends a message to the rank that has its stage, without blocking."""
        owner = self._owners[message.stage]
        if owner == self._p2p.rank:
            self._arrived[message] = [None if tensor is None else _leaf(tensor) for tensor in tensors], note
        else:
            self._sent[owner].append((self._needed[owner][message], self._p2p.send(owner, tensors, note)))

    def take(self, message: Message) -> Contents:
        """Waits for a message; those that arrive before it are kept."""
        source = self._owners[message.source]
        while message not in self._arrived:
            following, number = self._expected[source].pop()
            self._arrived[following] = self._p2p.receive(source)
            for needed, sent in self._sent[source]:
                if needed <= number:
                    self._p2p.settle(sent)
            self._sent[source] = [(needed, sent) for needed, sent in self._sent[source] if needed > number]
        return self._arrived.pop(message)


def packed(generators: Generators, value: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a stage's output, and a note of its form and the generators' state."""
    of_torch = [generator.get_state().numpy().tobytes() for generator in generators.of_torch]
    states = of_torch, random.getstate(), mtrand.get_state(legacy=False)
    return as_tensors(value), (isinstance(value, tuple | list), *states)


def unpacked(generators: Generators, tensors: Sequence[Tensor | None], note: Any) -> Any:
    """The value of a message; the generators go on from the state in it."""
    is_tuple, *states = note
    restore_generators(generators, *states)
    arrived = [tensor for tensor in tensors if tensor is not None]
    return tuple(arrived) if is_tuple else arrived[0]


def restore_generators(generators: Generators, of_torch: Sequence[bytes], of_python: Any, of_numpy: Any) -> None:
    """Puts all global generators in the state of another stage."""
    for generator, state in zip(generators.of_torch, of_torch, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    random.setstate(of_python)
    mtrand.set_state(of_numpy)


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory, cut off from the graph as if it had come from another rank."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
