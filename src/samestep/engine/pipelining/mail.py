"""The mail: what the stages of a step send each other, on this rank or from rank to rank."""

from collections.abc import Sequence

from torch import Tensor

from samestep.comm.relay import Relay, Sent
from samestep.engine.pipelining.schedule import Message, Schedule

Contents = tuple[Sequence[Tensor | None], bytes]


class Mail:
    """The messages of one step.

    What was sent is kept until it is known to have arrived: when something comes from a rank that it has sent after it
    needed ours.

    Args:
        relay: hands on what goes to another rank.
        schedule: says who sends what, and when: things come in that order, and wait here until they are wanted.
    """

    def __init__(self, relay: Relay, schedule: Schedule) -> None:
        self._relay = relay
        self._owners = schedule.owners
        others = [rank for rank in range(relay.world_size) if rank != relay.rank]
        self._expected = {source: list(schedule.messages(source, relay.rank).items())[::-1] for source in others}
        self._needed = {target: schedule.awaited(target) for target in others}
        self._sent: dict[int, list[tuple[int, Sent]]] = {target: [] for target in others}
        self._arrived: dict[Message, Contents] = {}

    def send(self, message: Message, tensors: Sequence[Tensor | None], note: bytes) -> None:
        """Sends a message to the rank that has its stage; never waits."""
        owner = self._owners[message.stage]
        if owner != self._relay.rank:
            self._sent[owner].append((self._needed[owner][message], self._relay.send(owner, tensors, note)))
            return
        self._arrived[message] = [None if tensor is None else _leaf(tensor) for tensor in tensors], note

    def take(self, message: Message, source_stage: int) -> Contents:
        """A message, once it is there.

        Args:
            message: which.
            source_stage: that sends it.
        """
        source = self._owners[source_stage]
        while message not in self._arrived:
            following, number = self._expected[source].pop()
            self._arrived[following] = self._relay.receive(source)
            for needed, sent in self._sent[source]:
                if needed <= number:
                    self._relay.settle(sent)
            self._sent[source] = [(needed, sent) for needed, sent in self._sent[source] if needed > number]
        return self._arrived.pop(message)


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory, as if it had come from another rank."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
