"""Defects that were once in the code: how each is put back, and a program that shows it.

    python tests/simulation/twins.py

searches for each by what seeds draw, and prints the table of CONTRIBUTING.md.
"""

import argparse
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
from checks import FAULT_CHECKS, Case
from grammar import Program
from run import Search

from samestep.checkpoint import resume, saver, state, storage, verified_files
from samestep.comm import reduction
from samestep.comm.communicator import Communicator
from samestep.comm.membership import END_OF_FIT
from samestep.data import fetch, loader
from samestep.data.loader import Loader
from samestep.engine import forward_backward, losses, microbatch_runner
from samestep.engine.buffers import BufferMerge
from samestep.engine.config import LossScale
from samestep.engine.forward_backward import ForwardBackward
from samestep.engine.gradients import GradientSum
from samestep.engine.norms import block_norm
from samestep.engine.step import TrainStep
from samestep.engine.zero1 import Zero1Parts
from samestep.run import progress
from samestep.run.hooks import EMA
from samestep.run.progress import Progress


def nothing(*_):
    """Does nothing."""


@contextmanager
def own_place(self):
    yield self


def stepped_again(self, saved, real=TrainStep.load_state_dict):
    real(self, saved)
    if self.scheduler is not None:
        self.scheduler.step()


def first_alone(self, saved, real=TrainStep.load_state_dict):
    if self.config.stream == 0:
        real(self, saved)


def all_but(missing, real=state.load_model):
    def load(model, tensors, *rest):
        before = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(missing)}
        real(model, tensors, *rest)
        for name, buffer in before.items():
            model.get_buffer(name).copy_(buffer)

    return load


def unsharded_alone(optimizer, saved, sharding=None, rank=0, real=state.load_optimizer):
    if sharding is None:
        real(optimizer, saved, sharding, rank)


def stopped_alone(self, *arguments, real=TrainStep._exchange):
    agreed = real(self, *arguments)
    self.membership.stop = END_OF_FIT if self.membership.asks_end else 0
    return agreed


def without_loss(self, resumed, real=Progress.restore):
    real(self, resumed)
    self.epoch.total = self.epoch.count = 0.0


# What is wrong: where and what it is replaced by, the check, the program, and further fields of its case.
TWINS = {
    "what was frozen in training is not restored": (
        (state, "_restore_extras", nothing),
        ("resumed", Program(samples=8, epochs=3, hooks=("thawing",))),
    ),
    "what a sampler keeps is not restored": (
        (progress, "_samplers", lambda loader: []),
        ("resumed", Program(data="own sampler", samples=8, epochs=2)),
    ),
    "samples are not seeded": (
        (fetch, "draws_nothing", lambda dataset: True),
        ("ranks", Program(data="rarely", samples=8, microbatches=2)),
    ),
    "a nested backward loses gradients": (
        (ForwardBackward, "keep_others", nothing),
        ("plain", Program(blocks=("recomputed",), reentrant=True)),
    ),
    "an evaluation moves the place of its loader": (
        (Loader, "whole_epoch", own_place),
        ("watched", Program(loop="own", samples=8, epochs=2)),
    ),
    "generators are not restored": (
        (state, "restore_generators", nothing),
        ("resumed", Program(samples=8, hooks=("drawing",))),
    ),
    "a moving average is not restored": (
        (EMA, "load_state_dict", nothing),
        ("resumed", Program(samples=8, hooks=("average",))),
    ),
    "the best checkpoint is that of before the evaluation": (
        (saver, "write_checkpoint", lambda *a, replace, real=storage.write_checkpoint: real(*a)),
        ("resumed", Program(samples=8, best='"loss"', evaluated="classes")),
    ),
    "a resume steps the scheduler once more": (
        (TrainStep, "load_state_dict", stepped_again),
        ("resumed", Program(samples=8, scheduler="step")),
    ),
    "a resume knows the first of several steps alone": (
        (TrainStep, "load_state_dict", first_alone),
        ("resumed", Program(loop="own", samples=8, critic=True)),
    ),
    "running statistics are those of a rank": (
        (BufferMerge, "_sum_means", lambda self, _: sum(self._mean_sum.sums)),
        ("ranks", Program(blocks=("batch norm",), microbatches=2)),
    ),
    "buffers that are not persistent are not restored": (
        (state, "load_model", all_but("scale")),
        ("resumed", Program(blocks=("counting",), samples=8)),
    ),
    "counts are those of a rank's part of the batch": (
        (Communicator, "sum_rows", lambda self, rows, ranges: rows.sum(0)),
        ("ranks", Program(loss="counts", microbatches=2)),
    ),
    "a loss is the mean of means": (
        (forward_backward, "read_loss", lambda value, count, *rest, real=losses.read_loss: real(value, 1, *rest)),
        ("nearly plain", Program(samples=5, batch=5, microbatches=2)),
    ),
    "gradients are clipped by the norm of a rank's part": (
        (Zero1Parts, "norm", lambda self, flats: block_norm(torch.cat(list(flats)))),
        ("ranks", Program(zero1=True, clip=True, optimizer="adam", microbatches=2)),
    ),
    "unused parameters have gradients of zeros": (
        (GradientSum, "assign", lambda self, used, real=GradientSum.assign: real(self, [True] * len(used))),
        ("plain", Program(blocks=("sometimes",), samples=8, optimizer="adam", epochs=2)),
    ),
    "microbatches draw in the order of their rank": (
        (microbatch_runner, "derive_seed", lambda *_: int(torch.randint(1 << 31, ()))),
        ("ranks", Program(blocks=("dropout",), microbatches=2)),
    ),
    "gradients are added in the order of the ranks": (
        (reduction, "fold", lambda blocks, values: torch.stack(list(values)).sum(0)),
        ("ranks", Program(samples=10, batch=5, microbatches=5), {"ranks": 4}),
    ),
    "the ragged end of an epoch is left out": (
        (loader, "batch_length", lambda at, n, size, drop_last, real=loader.batch_length: real(at, n, size, True)),
        ("plain", Program(samples=6)),
    ),
    "the state of a sharded optimizer is not restored": (
        (state, "load_optimizer", unsharded_alone),
        ("resumed", Program(samples=8, zero1=True, optimizer="momentum", microbatches=2)),
    ),
    "an optimizer's state is restored in its parameter's dtype": (
        (state, "load_optimizer", lambda optimizer, saved, *_: optimizer.load_state_dict(saved)),
        ("resumed", Program(blocks=("bfloat16",), samples=8, optimizer="nadam")),
    ),
    "the loss scale is not restored": (
        (LossScale, "load_state_dict", nothing),
        ("resumed", Program(samples=8, precision="16-mixed", loss="sometimes nan")),
    ),
    "damaged files of a checkpoint are taken": (
        (verified_files, "matches", lambda found, written: True),
        ("damaged", Program(samples=8, optimizer="momentum"), {"place": 2, "order": 90}),
    ),
    "a run that has only begun cannot be begun anew": (
        (resume, "is_same_run", lambda *_: False),
        ("crash", Program(), {"place": 12}),
    ),
    "a full disk is no sentence": (
        (storage, "writing", lambda path: nullcontext()),
        ("full disk", Program(), {"place": 18, "count": 1000}),
    ),
    "persistent workers begin anew": (
        (progress, "_waiting_workers", nothing),
        ("resumed workers", Program(data="own persistent", samples=8, epochs=3), {"place": 4}),
    ),
    "the rank that is asked to stop stops alone": (
        (TrainStep, "_exchange", stopped_alone),
        ("stopped", Program(samples=16, microbatches=2), {"order": 1, "count": 1}),
    ),
    "the loss of a resumed epoch is that of its rest": (
        (Progress, "restore", without_loss),
        ("resumed", Program(samples=8)),
    ),
    "streams move the script's generators": (
        (loader, "_quiet", lambda batches, _: batches),
        ("ranks", Program(data="iterable", microbatches=2, hooks=("drawing",))),
    ),
    "data workers draw by seeds of their own": (
        (fetch, "derive_seed", lambda *_: torch.initial_seed()),
        ("workers", Program(data="noisy", samples=8)),
    ),
}


def case_of(name):
    """The program that shows a defect."""
    check, program, *more = TWINS[name][1]
    return Case(program, (check,), **(more[0] if more else {}))


def kind_of(name):
    """What is drawn to find a defect."""
    return "faults" if TWINS[name][1][0] in FAULT_CHECKS else "programs"


def search_for(name, programs, first=1):
    """The number of programs until a defect is found, the seconds of CPU, and the smallest; None if it is not."""
    began, search = time.process_time(), Search(shrinking_seconds=0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*TWINS[name][0])
        seed = first
        while not search.smallest(kind_of(name), seed):
            seed += 1
            if search.counts["programs"] > programs:
                return None
        seconds, text = time.process_time() - began, Search(20).smallest(kind_of(name), seed)[0]
    return search.counts["programs"], seconds, text.splitlines()[0].strip('".')


def main():
    """Prints a row of the table for each defect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="for each of them at most")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("names", nargs="*", default=TWINS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in chosen.names:
        programs, seconds, text = search_for(name, chosen.programs, chosen.first) or ("not found", 0, "")
        print(f"| {name} | `{kind_of(name)}` | {programs} | {seconds:.0f} | {text} |", flush=True)


if __name__ == "__main__":
    main()
