"""The audit of a step: another rank computes one of its microbatches again, and the ranks compare their states.

Any rank computes any microbatch to the same bits, so a device that computes wrong ones shows. In every K-th step the
seed draws a microbatch, and a rank (the auditor) other than the one that executes it (the owner). The auditor fetches
its samples, and computes it before its own ones. Both keep the gradient, and a checksum of samples, loss, gradient and
buffers; with one of the state, this is a field of the control message that the ranks exchange in any case. All ranks
compare the fields, after the exchange and before anything is written. If they differ

    1. a third rank computes the microbatch too: who agrees with it is right. Of two ranks, each computes it once more,
       and the one that does not repeat its own bits is wrong, if the other does. Of a state, most ranks are right.
    2. checksums of each parameter name what differs.
    3. the step is abandoned, and repeated: without the wrong ranks, which end by an `AuditError`, as it is without
       lost ones (`comm.membership`); or, with the action "warn", by all.
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.comm.environment import parse_audit
from samestep.comm.membership import Membership
from samestep.core.seeds import derive_seed, microbatch_seed
from samestep.data.checksums import lacks_bytes, quick_sums
from samestep.data.nested import leaves
from samestep.engine.buffers import BufferMerge
from samestep.engine.forward_backward import ForwardBackward, backward_on_this_thread
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.parameters import PurityCheck
from samestep.engine.strategy import StepGradients, Strategy
from samestep.errors import AuditError, PeerLostError
from samestep.text import listed, notify

AUDIT_STREAM = 2**35  # distinct from the streams of steps, samples and evaluations
ATTEMPTS = 3  # of a step that is repeated by the same ranks
MOST_NAMES = 5
OWNER, AUDITOR = 0, 1


class RepeatStepError(Exception):
    """The step is to be taken once more, from the same state."""


class AuditFinding(NamedTuple):
    """What an audit found."""

    step: int  # counted from 1
    microbatch: int | None  # that was computed twice; None if the states differ
    ranks: tuple[int, ...]  # that are wrong; none if that cannot be told
    devices: tuple[str, ...]  # of these, with their hosts
    names: tuple[str, ...]  # of what differs
    action: str  # "warn" (the step was repeated), "exclude" or "stop"
    found: str  # all of it, in a sentence


class _Computed(NamedTuple):
    """One computation of the audited microbatch."""

    word: Tensor  # of all that follows
    parts: list[Tensor]  # checksums of samples, loss, buffers
    gradients: list[Tensor | None]


class Audit:
    """The audits of a training step (a `TrainStep`, whose module imports this one)."""

    def __init__(self, step: Any) -> None:
        self.findings: list[AuditFinding] = []
        self.microbatch = -1
        self._compute: ForwardBackward = step.compute
        self._membership: Membership = step.membership
        self._strategy: Strategy = step.strategy
        self._model, self._optimizers, self._compiling = step.model, step.optimizers, step.compiling
        self._every, self._action = parse_audit(step.config.audit)
        self._device = self._membership.communicator.device
        self._nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        self._owner = self._auditor = self._step = -1
        self._num_repeats = 0  # of the step under way
        self._computed: dict[int, _Computed] = {}

    def begin(self, step: int, num_leaves: int, fetch: Callable[[int], Any]) -> bool:
        """Draws the microbatch and the auditor, alike on all ranks; False for a step that is not audited."""
        self._computed = {}
        if step != self._step:
            self._step, self._num_repeats = step, 0
        if (step + 1) % self._every:
            return False
        membership, config = self._membership, self._compute.config
        drawn = derive_seed(config.seed, AUDIT_STREAM, config.stream, step)
        self.microbatch = drawn % num_leaves
        self._owner = next(rank for rank, mine in enumerate(membership.ranges) if self.microbatch in mine)
        others = max(1, membership.world_size - 1)
        self._auditor = (self._owner + 1 + derive_seed(drawn) % others) % membership.world_size
        self._fetch = fetch
        return True

    def is_repeating(self, step: int) -> bool:
        """Whether this step is taken once more."""
        return step == self._step and self._num_repeats > 0

    # The two computations.

    def compute_again(self, purity: PurityCheck, num_samples: int, counts: Any, is_only: bool) -> None:
        """On the auditor: computes the microbatch; on all ranks remembers what that needs, should one be a judge."""
        self._purity, self._arguments = purity, (num_samples, counts, is_only)
        if self._membership.rank == self._auditor:
            self._computed[AUDITOR] = self._run()

    def begin_own(self, microbatch: int, value: Any, gradients: StepGradients) -> None:
        """On the owner: before its own computation of the microbatch, which may write to its samples."""
        gradients.keeps = microbatch == self.microbatch
        if gradients.keeps:
            self._samples = self._sum_of(_read(value))

    def keep_own(self, microbatch: int, loss: MicrobatchLoss) -> None:
        """On the owner: keeps the gradient and the checksums."""
        if microbatch == self.microbatch:
            self._computed[OWNER] = self._summed(self._samples, loss)
            self._sums()[0].keeps = False

    def _run(self) -> _Computed:
        """Forward and backward of the microbatch, which leave nothing else behind."""
        compute, (gradients, buffers), config = self._compute, self._sums(), self._compute.config
        saved = compute.generators.save()
        try:
            compute.observers.on_phase("data")
            value = self._fetch(self.microbatch)
            samples = self._sum_of(_read(value))
            compute.generators.seed(microbatch_seed(config.seed, config.stream, self._step, self.microbatch))
            with backward_on_this_thread(self._device), self._compiling():
                loss = compute.run(gradients.inputs, value, *self._arguments)
            return self._summed(samples, loss)
        finally:
            for parameter in gradients.inputs:
                parameter.grad = None
            buffers.abandon()
            self._purity.restore_modes()
            compute.generators.restore(saved)

    def _summed(self, samples: Tensor, loss: MicrobatchLoss) -> _Computed:
        """The checksums of what a computation has left."""
        # References: a `.grad` is copied into the sums, and never written to.
        gradients = [parameter.grad for parameter in self._sums()[0].inputs]
        numbers = [one for one in (loss.value, loss.count, loss.scalars) if isinstance(one, Tensor)]
        parts = [samples, self._sum_of(numbers), self._sum_of(self._model.buffers())]
        return _Computed(self._sum_of([*parts, *(one for one in gradients if one is not None)]), parts, gradients)

    def _sums(self) -> tuple[StepGradients, BufferMerge]:
        return self._strategy.gradients, self._strategy.buffers

    # The comparison.

    def words(self) -> list[int]:
        """The field of this rank in the control message: checksums of its computations, and of its state."""
        computed = [self._computed[role].word if role in self._computed else self._nothing for role in (OWNER, AUDITOR)]
        state = self._state() if self._membership.world_size > 1 else {}
        words = torch.stack([*computed, self._sum_of(chain.from_iterable(state.values()))])
        return words.tolist()  # the only wait of the host for a device

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Compares the fields of all ranks, after the exchange; if they differ, it raises what ends this attempt."""
        if len({state for _, _, state in rows}) > 1:
            self._judge_states([state for _, _, state in rows])
        elif rows[self._owner][OWNER] != rows[self._auditor][AUDITOR]:
            self._judge_microbatch(rows[self._owner][OWNER], rows[self._auditor][AUDITOR])
        self._computed = {}

    def _judge_microbatch(self, of_owner: int, of_auditor: int) -> None:
        """Finds which of two computations is wrong."""
        membership, owner, auditor = self._membership, self._owner, self._auditor
        ranks = range(membership.world_size)
        third = [rank for rank in ranks if rank not in (owner, auditor)][:1]
        again = int(self._run().word) if membership.rank in (third or ranks) else 0
        words = [word for (word,) in membership.communicator.gather_words([again])]
        is_right = {owner: words[(third or [owner])[0]] == of_owner}
        is_right[auditor] = words[(third or [auditor])[0]] == of_auditor
        wrong = [rank for rank, right in is_right.items() if not right] if sum(is_right.values()) == 1 else []
        rows = membership.communicator.gather_words(self._details(OWNER) + self._details(AUDITOR))
        count = len(rows[0]) // 2
        pairs = zip(rows[owner][:count], rows[auditor][count:], strict=True)
        names = ["samples", "loss", "buffers", *(f"gradient of {name}" for name in self._names())]
        found = [name for name, (one, other) in zip(names, pairs, strict=True) if one != other]
        how = f"rank {third[0]} computed it a third time" if third else "it was computed once more"
        wrong = [owner] if owner == auditor else wrong  # alone it is wrong in any case
        self._conclude(
            f"microbatch {self.microbatch} of step {self._step + 1} was computed twice, by rank {owner} and, for the "
            f"audit, by rank {auditor}, with different bits in {listed(found, MOST_NAMES)}; {how}",
            wrong,
            found,
            (owner, auditor),
            self.microbatch,
        )

    def _judge_states(self, states: Sequence[int]) -> None:
        """Finds the ranks whose state differs from most ranks' state."""
        common, number = Counter(states).most_common(1)[0]
        odd = [rank for rank, state in enumerate(states) if state != common]
        wrong = odd if 2 * number > len(states) else []
        entries = self._state()
        rows = self._membership.communicator.gather_words([int(self._sum_of(of_it)) for of_it in entries.values()])
        found = [name for name, column in zip(entries, zip(*rows, strict=True), strict=True) if len(set(column)) > 1]
        self._conclude(
            f"the ranks' states differ in step {self._step + 1}, found by the audit: {listed(found, MOST_NAMES)} of "
            f"{_of_ranks(odd)} is not that of {_of_ranks([r for r in range(len(states)) if r not in odd])}",
            wrong,
            found,
            range(len(states)),
            None,
        )

    def _conclude(
        self, text: str, wrong: list[int], names: list[str], suspects: Sequence[int], microbatch: int | None
    ) -> None:
        """Records the finding, and raises what ends this attempt of the step."""
        membership, world_size, is_state = self._membership, self._membership.world_size, microbatch is None
        label = f"{_device_name(self._device)} of host {platform.node()}"
        labels = membership.communicator.gather_values(label)
        action = self._action
        is_in_vain = is_state or self._num_repeats + 1 == ATTEMPTS
        if not wrong or (len(wrong) == world_size if action == "exclude" else is_in_vain):
            action = "stop"
        if wrong:
            found = " and ".join(f"rank {rank} ({labels[rank]})" for rank in wrong)
            text += f": {found} {'is' if len(wrong) == 1 else 'are'} wrong"
        else:
            shown = " or ".join(f"rank {rank} ({labels[rank]})" for rank in dict.fromkeys(suspects))
            text += f": it cannot be told which is wrong, {shown}"
        devices = tuple(labels[rank] for rank in wrong)
        finding = AuditFinding(self._step + 1, microbatch, tuple(wrong), devices, tuple(names), action, text)
        if action != "exclude" or membership.rank not in wrong:  # the others go on, and record it
            self.findings.append(finding)
        if action == "warn":
            self._num_repeats += 1
            if membership.rank == 0:
                notify(f"{text}; the step is repeated")
            raise RepeatStepError
        if action == "stop":
            raise AuditError(
                f"{text}. Nothing of this step was written; go on from a checkpoint, on other devices, and test these"
            )
        if membership.rank in wrong:
            raise AuditError(f"{text}, and left out. Test this device before it is used again", is_left_out=True)
        raise PeerLostError(f"{text}, and left out", tuple(wrong))

    def _details(self, role: int) -> list[int]:
        """The checksums of the parts of a computation, zeros for one that another rank has."""
        if role not in self._computed:
            return [0] * (3 + len(self._sums()[0].inputs))
        _, parts, gradients = self._computed[role]
        return [*map(int, parts), *(0 if one is None else int(self._sum_of([one])) for one in gradients)]

    def _names(self) -> list[str]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [names.get(id(parameter), "a parameter") for parameter in self._sums()[0].inputs]

    def _state(self) -> dict[str, list[Tensor]]:
        """The tensors that every rank holds alike: of each parameter itself and its optimizer state, and buffers."""
        is_whole = self._strategy.state is None  # else each rank has another part of the optimizer's
        states = [optimizer.state for optimizer in self._optimizers if is_whole]
        found: dict[str, list[Tensor]] = {}
        for name, parameter in self._model.named_parameters():
            # By key: a state that was loaded may hold them in another order.
            kept = [value for state in states for _, value in sorted(state.get(parameter, {}).items())]
            found[name] = [parameter, *_read(kept)]
        return found | {name: [buffer] for name, buffer in self._model.named_buffers()}

    @torch.no_grad()
    def _sum_of(self, tensors: Iterable[Tensor]) -> Tensor:
        """A checksum of some tensors, 0-d int64 on the device."""
        return quick_sums([tensors], self._device)[0]


def _read(value: Any) -> list[Tensor]:
    """The tensors in a nested value whose bytes can be read."""
    return [one for one in leaves(value) if isinstance(one, Tensor) and (one.is_sparse or not lacks_bytes(one))]


def _device_name(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}, {device}" if device.type == "cuda" else str(device)


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
