"""The runner: takes the shards of a step through this rank's stages, in the order of the schedule."""

import struct
from typing import Any

import torch
from torch import Tensor

from samestep.comm.team import Team
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.engine.counts import GlobalCounts
from samestep.engine.guard import ModelGuard
from samestep.engine.losses import ShardLoss, wide_dtype
from samestep.engine.memory import describe_lone_shortage, is_out_of_memory
from samestep.engine.pipelining.backward import (
    ShardInStage,
    check_read,
    input_backward,
    weight_backward,
    whole_backward,
)
from samestep.engine.pipelining.buffers import StageBuffers
from samestep.engine.pipelining.gradients import PipelinedGradientSum
from samestep.engine.pipelining.mail import Contents, Mail
from samestep.engine.pipelining.model import PipelinedModel
from samestep.engine.pipelining.parcel import packed, unpacked
from samestep.engine.pipelining.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Message, make_schedule
from samestep.engine.pipelining.splitting import as_tensors, like
from samestep.engine.pipelining.standin import LeaveError, StandIn
from samestep.engine.rows import DeviceRows, HostRows
from samestep.engine.shards import ShardRunner, check_differentiable
from samestep.errors import OutOfMemoryError
from samestep.plan.seeds import derive_seed
from samestep.plan.shards import shard_bounds

LOOKED_STEPS = 2
LOSS_WEIGHT = struct.Struct("=d")


class PipelineRunner:
    """Runs the shards of a global batch through this rank's stages; in the place of a `ShardRunner`.

    Args:
        pipelined: the model.
        team: whose ranks share the work.
        seed: of the run.
        stream: tells the randomness of this train step from that of others.
        inner: knows how one shard is computed.
        rows: where the first stage says what came of each shard.

    Attributes:
        counts: sums of `counts_fn` over the global batch; None without one.
        gradients: what the shards' gradients are pushed on.
        buffers: what the shards' buffers are merged by.
        guard: watches the model while shards run.
        graphs: None: stages do not run as CUDA graphs.
    """

    counts: GlobalCounts | None
    gradients: PipelinedGradientSum
    buffers: StageBuffers
    guard: ModelGuard
    graphs = None

    def __init__(
        self,
        pipelined: PipelinedModel,
        team: Team,
        seed: int,
        stream: int,
        inner: ShardRunner,
        rows: HostRows | DeviceRows,
    ) -> None:
        self._pipelined = pipelined
        self._team = team
        self._seed = seed
        self._stream = stream
        self._inner = inner
        self._rows = rows
        self.generators: Generators = inner.generators
        self._last = len(pipelined.stages) - 1
        self._kept: dict[tuple[int, int], ShardInStage] = {}
        self._mail: Mail
        self._batch: Batch
        self._step = 0
        self._shards: range = range(0)
        self._bounds: list[int] = []
        self._counts: Any = None
        self._is_only = False

    def run(self, batch: Batch, step: int) -> None:
        """Forward and backward of the shards that this rank executes together with those of its pipeline.

        Raises:
            PeerLostError: a rank with another stage is lost, or has failed.
            OutOfMemoryError: a shard did not fit.
        """
        team, options = self._team, self._pipelined.options
        self._inner.counts = self.counts
        self._counts = None if self.counts is None else self.counts.sum(batch, team.data_ranges)
        self._is_only = batch.length == 1 or team.num_shards == 1
        self._bounds = shard_bounds(batch.length, team.num_shards)
        shards = team.executed
        self._shards = range(shards.start, max(shards.start, min(shards.stop, batch.length)))
        self._batch, self._step = batch, step
        relay = team.relay
        schedule = make_schedule(options.schedule, relay.world_size, options.stages_per_rank, len(self._shards))
        self._mail = Mail(relay, schedule)
        self._kept = {}
        self._rows.begin(team.mine)
        self.guard.begin(step)
        saved = self.generators.save()
        try:
            for action in schedule.actions[relay.rank]:
                self._do(action)
            relay.settle()
        except BaseException as error:
            relay.fail(f"rank {team.rank}, which has another stage of the model, failed: {error}")
            raise
        finally:
            self.generators.restore(saved)
            self.guard.end()
            self._kept, self._counts = {}, None
            del self._batch, self._mail

    def _do(self, action: Action) -> None:
        """Carries out one action."""
        shard = self._shards[action.place]
        try:
            if action.kind == FORWARD:
                self._team.pulse.enter("forward")
                self._forward(action, shard)
                self.guard.check()
                self.guard.restore_modes()
                self.buffers.collect(action.stage, shard, self._num_samples(shard))
            else:
                self._team.pulse.enter("backward")
                self._backward(action, shard)
                self.buffers.check_start(action.stage)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            text = describe_lone_shortage(shard, self._num_samples(shard), self._team.rank, "pipeline")
            raise OutOfMemoryError(text) from error
        except ValueError as error:
            told = self._inner.explain_lone(error, shard, self._num_samples(shard), self._batch.length, self._step)
            if told is None:
                raise
            raise told from None

    def _num_samples(self, shard: int) -> int:
        return self._bounds[shard + 1] - self._bounds[shard]

    def _forward(self, action: Action, shard: int) -> None:
        """Runs the loss function as far as this stage goes."""
        stage, module = action.stage, self._pipelined.stages[action.stage]
        kept = self._kept[stage, action.place] = ShardInStage([], [])

        def run(given: Any) -> Any:
            if stage:
                given = unpacked(self.generators, *self._take(Message(FORWARD, stage, action.place), stage - 1))
                kept.inputs = as_tensors(given)
                if module.writes_to_input:
                    given = like(given, [tensor.clone() for tensor in kept.inputs])
            output = module(given)
            if stage < self._last:
                kept.outputs, note = packed(self.generators, output)
                self._mail.send(Message(FORWARD, stage + 1, action.place), kept.outputs, note)
            return output

        self.generators.seed(derive_seed(self._seed, self._stream, self._step, shard))
        stand_in = StandIn(self._pipelined.model, run, returns=stage == self._last)
        samples = self._num_samples(shard)
        try:
            with self._inner.autocast():
                loss = self._inner.forward(stand_in, self._batch.shards[shard], samples, self._counts)
        except LeaveError:
            return
        stand_in.check_called()
        check_differentiable(loss)
        if self._step < LOOKED_STEPS:
            check_read(loss.value, self._pipelined.foreign)
        kept.loss, kept.outputs = loss, [loss.value]

    def _backward(self, action: Action, shard: int) -> None:
        """Runs a backward, or a part of one, and hands on the gradient of the input as soon as it is there."""
        stage, place = action.stage, action.place
        kept = self._kept[stage, place]
        parameters = self.gradients.stage_parameters[stage]
        if action.kind != WEIGHT:
            self._begin_backward(kept, stage, place)
        found: list[Tensor | None] = []
        if action.kind == INPUT:
            found = input_backward(kept, parameters)
            if stage:
                self._hand_back(kept, stage, place, found)
            return
        if action.kind == BACKWARD:
            found = whole_backward(kept, parameters)
        else:
            weight_backward(kept, parameters)
        assert kept.row is not None, "the backward has begun"
        kept.row[1][1] += self.gradients.collect(stage, shard)
        if action.kind == BACKWARD or stage == 0:
            self._hand_back(kept, stage, place, found)
        del self._kept[stage, place]

    def _begin_backward(self, kept: ShardInStage, stage: int, place: int) -> None:
        """Takes what the backward of a stage begins with."""
        if kept.loss is not None:
            loss = kept.loss
            kept.seeds = [self._inner.seed_of(loss, self._is_only)]
            stats = torch.zeros(2, dtype=wide_dtype(loss.value.device), device=loss.value.device)
            stats[0] = loss.count
            kept.weight, kept.row = loss.weight, (loss.value.detach(), stats)
            return
        (value, stats_of, *seeds), note = self._take(Message(BACKWARD, stage, place), stage + 1)
        assert value is not None, "the row is always there"
        assert stats_of is not None, "the row is always there"
        kept.seeds, kept.row = seeds, (value, stats_of)
        (kept.weight,) = LOSS_WEIGHT.unpack(note)

    def _take(self, message: Message, source_stage: int) -> Contents:
        """Waits for a message; who waits is not the one who hangs."""
        before = self._team.pulse.enter("exchange")
        contents = self._mail.take(message, source_stage)
        self._team.pulse.enter(before)
        return contents

    def _hand_back(self, kept: ShardInStage, stage: int, place: int, found: list[Tensor | None]) -> None:
        """Sends the gradients of the input to the stage before, and the shard's row with them; the first notes it."""
        assert kept.row is not None, "the backward has begun"
        value, stats = kept.row
        if stage:
            note = LOSS_WEIGHT.pack(kept.weight)
            sent = stats.clone()  # this stage adds to its own when its weights come later
            self._mail.send(Message(BACKWARD, stage - 1, place), [value, sent, *found], note)
        elif self._team.mine:
            self._rows.note(self._shards[place], ShardLoss(value, kept.weight, stats[0]), stats[1])
