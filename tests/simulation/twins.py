"""Defects that were once in the code, or might be: how each is put back, and a program that shows it.

    python tests/simulation/twins.py

searches for each by what seeds draw, and prints the table of MAINTAINING.md.
"""

import argparse
import os
import pkgutil
import sys
from contextlib import contextmanager, nullcontext  # noqa: F401 (of the table)
from dataclasses import replace
from functools import reduce  # noqa: F401 (of the table)
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))

import drawn_scripts  # noqa: F401 (of the table)
import pytest
import torch
from checks import FAULT_CHECKS, Case, over_processes, run_script, script
from grammar import Program, table  # noqa: F401 (of the table)
from run import Search
from simulated_collectives import Call  # noqa: F401 (of the table)
from simulated_machines import Fault, MachineFault, MachinesSchedule  # noqa: F401 (of the table)

from samestep.comm.environment import read_settings  # noqa: F401 (of the table)
from samestep.comm.requests import END_OF_FIT
from samestep.engine.norms import block_norm  # noqa: F401 (of the table)
from samestep.errors import SamestepError

OVER_PROCESSES = ("processes", "scripts")


def nothing(*_):
    """Does nothing."""


def without_scale(load):
    """A function that loads all of a model but a buffer."""

    def load_rest(model, *arguments):
        before = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("scale")}
        load(model, *arguments)
        for name, buffer in before.items():
            model.get_buffer(name).copy_(buffer)

    return load_rest


def stopped_alone(exchanged, step):
    """What an exchange returns, without the stop on which the ranks agree."""
    agreed, *others = exchanged
    return replace(agreed, stop=END_OF_FIT if step.membership.requests.asks_end else 0), *others


def folding(operation, order):
    """The operation, which folds the parts of the ranks in another order."""
    return SimpleNamespace(prepared=operation.prepared, fold=lambda parts, into: operation.fold(order([*parts]), into))


# What is wrong: the function and by what it is replaced, beside `real`, the check, the program, and fields of its case.
TWINS = table("""
    what was frozen in training is not restored: checkpoint.state._restore_extras = nothing
        | resumed | Program(samples=8, epochs=3, hooks=("thawing",))
    what a sampler keeps is not restored: run.progress._parts = lambda loader: []
        | resumed | Program(data="own sampler", samples=8, epochs=2)
    samples are not seeded: data.fetch.SeededSamples.__getitems__ = lambda self, request: [
        self._collate([self._dataset[i] for i in ids.tolist()]) for ids in request.microbatches]
        | ranks | Program(data="rarely", samples=8, microbatches=2)
    a nested backward loses gradients: engine.forward_backward.ForwardBackward.keep_others = nothing
        | plain | Program(blocks=("recomputed",), reentrant=True)
    an evaluation moves the place of its loader: data.loader.Loader.whole_epoch = lambda self: nullcontext(self)
        | watched | Program(loop="own", samples=8, epochs=2)
    generators are not restored: checkpoint.state.restore_generators = nothing
        | resumed | Program(samples=8, hooks=("drawing",))
    a moving average is not restored: run.hooks.EMA.load_state_dict = nothing
        | resumed | Program(samples=8, hooks=("average",))
    the best checkpoint is that of before the evaluation:
        checkpoint.async_save.write_checkpoint = lambda *arguments, replace: real(*arguments)
        | resumed | Program(samples=8, best='"loss"', evaluated="classes")
    a resume steps the scheduler once more:
        engine.step.TrainStep.load_state_dict = lambda self, saved: (
        real(self, saved), self.scheduler and self.scheduler.step())
        | resumed | Program(samples=8, scheduler="step")
    a resume knows the first of several steps alone:
        engine.step.TrainStep.load_state_dict = lambda self, saved: self.config.stream or real(self, saved)
        | resumed | Program(loop="own", samples=8, critic=True)
    running statistics are those of a rank:
        engine.buffers.BufferMerge._sum_means = lambda self, _: sum(self._mean_sum.sums)
        | ranks | Program(blocks=("batch norm",), microbatches=2)
    buffers that are not persistent are not restored: checkpoint.state.load_model = without_scale(real)
        | resumed | Program(blocks=("counting",), samples=8)
    counts are those of a rank's part of the batch:
        comm.communicator.Communicator.sum_rows = lambda self, rows, ranges: rows.sum(0)
        | ranks | Program(loss="counts", microbatches=2)
    a loss is the mean of means:
        engine.forward_backward.read_loss = lambda value, count, *rest: real(value, 1, *rest)
        | nearly plain | Program(samples=5, batch=5, microbatches=2)
    gradients are clipped by the norm of a rank's part:
        engine.zero1.Zero1Parts.norm = lambda self, flats: block_norm(torch.cat(list(flats)))
        | ranks | Program(zero1=True, clip=True, optimizer="adam", microbatches=2)
    unused parameters have gradients of zeros:
        engine.gradients.GradientSum.assign = lambda self, used: real(self, [True] * len(used))
        | plain | Program(blocks=("sometimes",), samples=8, optimizer="adam", epochs=2)
    microbatches draw in the order of their rank:
        engine.microbatch_runner.microbatch_seed = lambda *_: int(torch.randint(1 << 31, ()))
        | ranks | Program(blocks=("dropout",), microbatches=2)
    gradients are added in the order of the ranks:
        comm.reduction.fold = lambda blocks, values, _=None: torch.stack(list(values)).sum(0)
        | ranks | Program(samples=10, batch=5, microbatches=5) | ranks=4
    the ragged end of an epoch is left out:
        data.loader.batch_length = lambda at, n, size, drop_last: real(at, n, size, True)
        | plain | Program(samples=6)
    the state of a sharded optimizer is not restored:
        checkpoint.state.load_optimizer = lambda optimizer, saved, sharding=None, rank=0:
        sharding or real(optimizer, saved)
        | resumed | Program(samples=8, zero1=True, optimizer="momentum", microbatches=2)
    an optimizer's state is restored in its parameter's dtype:
        checkpoint.state.load_optimizer = lambda optimizer, saved, *_: (
        optimizer._optimizer_load_state_dict_post_hooks.clear(), optimizer.load_state_dict(saved))
        | resumed | Program(blocks=("bfloat16",), samples=8, optimizer="nadam")
    the loss scale is not restored: engine.precision.LossScale.load_state_dict = nothing
        | resumed | Program(samples=8, precision="16-mixed", loss="sometimes nan")
    damaged files of a checkpoint are taken: checkpoint.verified_files.matches = lambda found, written: True
        | damaged | Program(samples=8, optimizer="momentum") | place=2, order=90
    a run that has only begun cannot be begun anew: checkpoint.resume.is_same_run = lambda *_: False
        | crash | Program() | place=12
    a full disk is no sentence: checkpoint.storage.writing = lambda path: nullcontext()
        | full disk | Program() | place=18, count=1000
    the rank that is asked to stop stops alone:
        engine.step.TrainStep._exchange = lambda self, *arguments: stopped_alone(real(self, *arguments), self)
        | stopped | Program(samples=16, microbatches=2) | order=1, count=1
    the loss of a resumed epoch is that of its rest: run.progress.Progress.restore = lambda self, resumed: (
        real(self, resumed), vars(self.epoch).update(total=0.0, count=0.0))
        | resumed | Program(samples=8)
    streams move the script's generators: data.loader._quiet = lambda batches, _: batches
        | ranks | Program(data="iterable", microbatches=2, hooks=("drawing",))
    data workers draw by seeds of their own: data.fetch.derive_seed = lambda *_: torch.initial_seed()
        | workers | Program(data="noisy", samples=8)
    sums of six microbatches are added from left to right:
        comm.reduction.fold = lambda blocks, values, out=None: real(blocks, values, out)
        if sum(block.size for block in blocks) != 6 else reduce(torch.add, values)
        | ranks | Program(samples=12, batch=6, microbatches=6)
    a resume begins a microbatch late: data.loader.Loader.load_state_dict = lambda self, state: (
        real(self, state), vars(self).update(cursor=replace(self.cursor, position=self.cursor.position + 1))
        if 0 < self.cursor.position < self._num_samples and not self.is_stream else None)
        | resumed | Program(samples=8)
    an evaluation moves the generators of the script:
        data.randomness.Generators.preserved = lambda self: nullcontext()
        | ranks | Program(samples=8, microbatches=2, evaluated="classes", hooks=("drawing",))
    a ragged batch is divided as if it had four samples: engine.step.divisor = lambda count: real(max(count, 4))
        | nearly plain | Program(samples=6, microbatches=2)
    an audit draws other numbers than the step: engine.audit.microbatch_seed = lambda *_: 1
        | ranks | Program(blocks=("dropout",), microbatches=2, options=("train_step: audit=1",))
    a step after a loss counts twice: engine.step.TrainStep._update = lambda self, *arguments: (
        self.membership.version and not hasattr(self, "counted") and vars(self).update(
        counted=[flat.mul_(2) for flat in self.strategy.gradients.flats]), real(self, *arguments))[1]
        | struck | Program(microbatches=2, epochs=3) | ranks=(1, 0), faults=((0, 1, "SIGKILL"),)
    hooks are called twice after a loss: run.hooks.Hooks.on_update = lambda self, step, result: (
        real(self, step, result), step.membership.version and not hasattr(self, "has_called") and vars(self).update(
        has_called=self.call("on_step_end", result)))
        | struck | Program(microbatches=2, epochs=3, hooks=("drawing",)) | ranks=(1, 0), faults=((0, 1, "SIGKILL"),)
    going on after a loss draws from the generators of the program:
        comm.membership.Membership._heal = lambda self, *arguments: (real(self, *arguments), torch.rand(()))[0]
        | struck | Program(microbatches=2, epochs=3, hooks=("drawing",)) | ranks=(1, 0), faults=((0, 1, "SIGKILL"),)
    what a module uses several times is added up before the rest: engine.sharded_model._hide_activations = nothing
        | strategies | Program(blocks=("attention",), optimizer="adam") | strategies=("kept", "replicate")
    a state of a stream is that of another one: data.streams.Streams._exchange = lambda self, *arguments: (
        lambda sizes, saved: (sizes, saved if saved is self._saved or self._membership.world_size == 1
        else [saved[index - index % 2] for index in range(len(saved))]))(*real(self, *arguments))
        | resumed | Program(data="streams", samples=16, microbatches=2, options=("loader: exact_states=True",))
    the places of streams are those of others: data.streams.Streams._exchange = lambda self, *arguments: (
        lambda sizes, saved: (sizes[:: -1 if self._membership.world_size > 1 else 1], saved))(*real(self, *arguments))
        | ranks | Program(data="streams", samples=7, microbatches=4)
    a sum of three ranks begins with the own part:
        logical.collectives._Piece.fold = lambda self: (self._transport.world_size == 3 and setattr(self, "_operation",
        folding(self._operation, lambda parts: parts[(rank := self._transport.rank) :] + parts[:rank])), real(self))
        | calls | ([Call("all_reduce", shape=(9,))], 3, (None, 0))
    an average divides by another number in groups of five and seven:
        logical.collectives.Operation.fold = lambda self, parts, into: (real(self, parts, into),
        self.name == "AVG" and len(parts) in (5, 7) and into.copy_(into * 0.5))
        | calls | ([Call("all_reduce", op="AVG")], 5, (None, 0))
    a sum of uneven parts begins with the last rank:
        logical.collectives.reduce_scatter = lambda transport, parts, sizes, into, op:
        real(transport, parts, sizes, into, op if len({*sizes}) == 1 else folding(op, lambda parts: parts[::-1]))
        | calls | ([Call("reduce_scatter_uneven", shape=(9,))], 3, (None, 0))
    workers keep the first of the weights that they had: scripts.workers.image.Image.stale = lambda self, everything:
        real(self, everything)[1:]
        | runs | [drawn_scripts.allowed(kind="plain", saves=True)]
    chunks of a ragged batch are cut otherwise: scripts.split_forward.chunks.chunk_sizes = lambda length, count:
        real(length, count)[::-1]
        | runs | [drawn_scripts.allowed(kind="parallel", samples=7, batch=3)]
    ranks that share a device have its seed: scripts.seeding.seeded_rank = lambda rank, seed:
        real(read_settings().device_index if read_settings().fds.get("devices") else rank, seed)
        | runs | [drawn_scripts.allowed(seeds="none")]
    sums have another order where ranks share a device: logical.collectives.Operation.fold = lambda self, parts, into:
        real(self, parts[::-1] if read_settings().fds.get("devices") else parts, into)
        | runs | [drawn_scripts.allowed(ranks=3, samples=12, epochs=3)]
    other machines get the quorum before the one in force:
        launcher.follower.Follower._take_page = lambda self, attempt, has: (
        real(self, attempt, getattr(self, "had", has)), vars(self).update(had=has))
        | machines | MachinesSchedule((1, 2), (Fault("killed", 2, 1),))
    the workers of a lost machine have not ended for the leader: launcher.machines.MachinesPool._end_all = nothing
        | machines | MachinesSchedule((1, 1), (), (MachineFault("dies", 1, 20),))
    a machine that hears nothing from the leader keeps its workers:
        launcher.follower.Follower._send_beats = lambda self: (
        real(self), setattr(self._wire, "heard_at", float("inf")))
        | machines | MachinesSchedule((1, 1), (), (MachineFault("cut", 1, 20, 80),))
    the workers of a lost machine are lost one after another: launcher.monitor.Monitor._handle_ends =
        lambda self, events: [real(self, [event]) for event in events]
        | machines | MachinesSchedule((1, 2), (), (MachineFault("ends", 1, 21),), 1, 4, 6)
    a machine is lost only when its connection closes:
        launcher.meeting.Meeting.silence_seconds = property(lambda self: 1e9)
        | machines | MachinesSchedule((1, 1), (), (MachineFault("dies", 1, 20),))
""")


def case_of(name):
    """The program that shows a defect."""
    _, check, program, *more = TWINS[name].split(" | ")
    if check in ("calls", "runs", "machines"):
        return eval(program)
    fields = eval(f"dict({''.join(more)})")
    if check in ("strategies", "struck"):
        return over_processes(eval(program), check, **fields)
    return Case(eval(program), (check,), **fields)


def kind_of(name):
    """The kind of programs that show a defect."""
    case = case_of(name)
    if isinstance(case, MachinesSchedule):
        return "membership"
    if isinstance(case, tuple | list):
        return "collectives" if isinstance(case, tuple) else "scripts"
    if case.numbers:
        return "processes"
    return "faults" if case.checks[0] in FAULT_CHECKS else "programs"


@contextmanager
def put_back(name):
    """The defect is in the code within the block."""
    place, _, instead = TWINS[name].split(" | ")[0].partition(" = ")
    real = pkgutil.resolve_name(f"samestep.{place}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"samestep.{place}", eval(instead, globals() | {"real": real}))
        yield


def check_twin(name):
    """Fails unless the program that shows a defect holds, and fails with the defect."""
    text = script(case_of(name))
    run_script(text)
    with put_back(name), pytest.raises((AssertionError, LookupError, OSError, RuntimeError, SamestepError)):
        run_script(text)


def search_for(name, programs, first=1):
    """The kind of programs, their number until a defect is found, and the seconds of CPU; whether it is found."""
    began, search, seed = sum(os.times()[:4]), Search(shrinking_seconds=0), first
    kind = kind_of(name)
    with put_back(name):
        while not (found := search.smallest(kind, seed)) and search.counts["programs"] <= programs:
            seed += 1
        seconds = sum(os.times()[:4]) - began  # also of processes that have ended
    if found:
        run_script(found[0])  # holds without the defect
    return kind, search.counts["programs"], seconds, found is not None


def main():
    """Prints a row of the table for each defect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="for each of them at most")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("names", nargs="*", default=TWINS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in chosen.names:
        kind, programs, seconds, is_found = search_for(name, chosen.programs, chosen.first)
        print(f"| {name} | `{kind}` | {programs}{'' if is_found else ', not found'} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
