"""A training script with the given faults: `faulty_training.py JSON`.

JSON holds "folder" (of the run), "faults", a list of {"rank", "step", "phase", "kind"}, and perhaps "spares", "resume",
"checkpoint_steps", "epochs", "pause" (seconds a microbatch), and "wait_for": a slot that has to be there before step 6
ends; "options" are the step's, "fused" is Adam's, "plain" leaves BatchNorm out, with "messages" NCCL takes two messages
for a sum, with "streams" each microbatch has one, "thaws" adds an average of the weights and a hook that evaluates at
the start and trains the first layer from the second epoch on, "num_workers" fetch samples, "best" is the trainer's;
"timeout" is that of an exchange, "abort_seconds" that of NCCL's abort. A fault may "skip" so many passages, or strike
"once", whatever restarts. It leaves a file behind that says where it struck;
"pid-SLOT" is there once a worker has taken a step.
"""

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from programs import classify, small_images, small_model
from torch.utils.data import Dataset, Subset

from samestep.checkpoint import async_save as saver_module
from samestep.checkpoint import export as export_module
from samestep.checkpoint import resume as resume_module
from samestep.checkpoint import storage as checkpoint_module
from samestep.comm import connecting, group, transport
from samestep.comm.environment import read_settings
from samestep.comm.group import GroupTransport
from samestep.comm.heartbeat import HEALS, READY_TO_JOIN, HeartbeatPage
from samestep.comm.shared_memory import SharedTransport
from samestep.engine.buffers import BufferMerge
from samestep.engine.gradients import GradientSum
from samestep.metrics import accuracy
from samestep.run.hooks import EMA
from samestep.run.run import Run
from samestep.run.trainer import Trainer
from samestep.runs import recorder as loggers_module
from samestep.runs import recorder as recorder_module

WAITS_IN_STEP = 6


class Samples(Dataset):
    """Small images one by one; fetching one may be where it goes wrong."""

    def __init__(self, count, strike):
        self._images, self._labels = small_images(count)
        self._strike = strike

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, index):
        self._strike("data")
        return self._images[index], self._labels[index]


class Faults:
    """The faults of this rank."""

    def __init__(self, faults, slot, folder):
        self._mine = [fault for fault in faults if fault["rank"] == slot]
        self._slot, self._folder = slot, folder
        self.step = lambda: -1

    is_wrong = False  # whether this device computes wrong gradients

    def strike(self, phase):
        for fault in self._mine:
            has_struck = "once" in fault and (self._folder / f"struck-{self._slot}.json").exists()  # before a restart
            if fault["phase"] == phase and self.step() >= fault["step"] and not has_struck:
                fault["skip"] = fault.get("skip", 0) - 1
                if fault["skip"] >= 0:
                    continue
                self._mine.remove(fault)
                self._do(fault)
                return

    def is_due(self, phase):
        return any(fault["phase"] == phase and self.step() >= fault["step"] for fault in self._mine)

    def tell_pid(self):
        path = self._folder / f"pid-{self._slot}"
        if not path.exists():
            path.write_text(str(os.getpid()))

    def _do(self, fault):
        told = {**fault, "at": self.step()}
        (self._folder / f"struck-{self._slot}.json").write_text(json.dumps(told))
        if fault["kind"].startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[fault["kind"]])
        elif fault["kind"].startswith(("machine ", "supervisor ")):
            of, name = fault["kind"].split()
            strike_machine(signal.Signals[name], alone=of == "supervisor")
        elif fault["kind"] == "exit":
            os._exit(3)
        elif fault["kind"] == "device":
            raise torch.AcceleratorError(f"CUDA error: something went wrong on rank {self._slot}")
        elif fault["kind"] == "flip":  # a bit of the state
            self.model[0].weight.data.view(-1).view(torch.int32)[0] ^= 1 << 20
        elif fault["kind"] == "wrong gradients":  # from now on
            self.is_wrong = True
        elif fault["kind"] == "exit 0":
            os._exit(0)
        elif fault["kind"] == "spin":
            while True:
                pass
        elif fault["kind"] == "hang in C":
            ctypes.PyDLL(None).sleep(1000)  # without letting go of the interpreter's lock
        else:
            raise RuntimeError(f"something went wrong on rank {self._slot}")


def strike_machine(signum, alone):
    """Signals the supervisor of this worker's machine, and all other processes of it, this one last."""
    supervisor = psutil.Process().parent().parent()  # the parent is the fork server
    spared = ("sh",)  # it removes the temporary folder, which a machine that is gone would keep
    others = [] if alone else supervisor.children(recursive=True)
    others = [each for each in others if each.pid != os.getpid() and each.name() not in spared]
    for process in [supervisor, *others]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)
    if not alone:
        os.kill(os.getpid(), signum)


def striking(faults, real):
    """An exchange or a gather of a transport, before and after which things go wrong."""

    def exchange(self, *args, **options):
        faults.strike("exchange")
        pending = real(self, *args, **options)
        faults.strike("sent")
        return pending

    return exchange


def put_in_place(faults, model, optimizer):
    """Puts the faults where the training passes by."""
    faults.model = model
    model[-1].weight.register_hook(lambda gradient: -gradient if faults.is_wrong else None)
    model[0].register_forward_pre_hook(lambda *_: faults.strike("forward" if model.training else "evaluate"))
    model[-1].register_full_backward_pre_hook(lambda *_: faults.strike("backward"))
    optimizer.register_step_pre_hook(lambda *_: faults.strike("update"))
    for kind in (GroupTransport, SharedTransport):
        kind.exchange, kind.gather = striking(faults, kind.exchange), striking(faults, kind.gather)
    real_fill, real_merge = checkpoint_module._fill, BufferMerge.exchange
    real_finish = GradientSum.finish

    def fill(*args):
        result = real_fill(*args)
        faults.strike("checkpoint")
        return result

    def merge(self, *args):
        real_merge(self, *args)
        faults.strike("exchanged")

    def finish(self):
        faults.strike("finish")
        real_finish(self)

    striking_writes(faults)
    checkpoint_module._fill, BufferMerge.exchange, GradientSum.finish = fill, merge, finish


class Thaw:
    """A hook that measures the frozen model at the start of a fit, and lets the first layer train later."""

    def on_fit_start(self, trainer):
        trainer.evaluate(small_images(23), {"accuracy": accuracy})

    def on_epoch_start(self, trainer, epoch):
        trainer.model[0].requires_grad_(epoch > 1)


class Ends:
    """A hook in which things go wrong."""

    def __init__(self, faults):
        self._faults = faults

    def on_epoch_end(self, trainer, record):
        self._faults.strike("epoch end")


def striking_writes(faults):
    """Puts faults where the rank that writes passes by, and where ranks connect anew."""

    def before(owner, name, phase):
        real = getattr(owner, name)

        def struck(*args, **options):
            if (named := phase(*args)) is not None:
                faults.strike(named)
            return real(*args, **options)

        setattr(owner, name, struck)

    def torn(file, path, data):
        """Half a line is written of an epoch."""
        kind = "metrics" if path.name == "metrics.jsonl" else "events"
        if b"loss/train_epoch" not in data:
            return None
        if faults.is_due(kind):
            file.write(data[: len(data) // 2])
        return kind

    before(connecting, "reconnect", lambda *_: "reconnect")
    before(checkpoint_module, "point_to", lambda folder, file, name: f"point {file}")
    before(checkpoint_module, "write_sealed_tensors", lambda path, tensors: f"write {path.stem}")
    before(checkpoint_module, "_discard", lambda path: "discard")
    before(saver_module.CheckpointSaver, "save", lambda saver, snapshot: "save")
    before(loggers_module, "append_whole", torn)
    before(recorder_module.Recorder, "draw", lambda *_: "draw")
    before(export_module, "write_tensors", lambda *_: "weights")


def between_steps(trainer, faults):
    """Puts a fault between two steps."""
    attend = trainer._attend

    def strike_and_attend(loader):
        faults.tell_pid()
        faults.strike("between")
        attend(loader)

    trainer._attend = strike_and_attend


def wait_for(slot):
    """Waits until a worker is ready to join, or has joined."""
    page = HeartbeatPage.from_environment()[0]
    while not page.beat(slot).flags & (READY_TO_JOIN | HEALS):
        time.sleep(0.01)


def main():
    told = json.loads(sys.argv[1])
    folder = Path(told["folder"])
    slot = read_settings().slot
    faults = Faults(told.get("faults", ()), slot, folder.parent)
    read = resume_module.newest_checkpoint

    def newest(*args, **options):
        (folder.parent / f"read-a-checkpoint-{slot}").touch()
        return read(*args, **options)

    resume_module.newest_checkpoint = newest
    if told.get("messages"):
        group.LATENCY_BYTES["nccl"] = 0
    if "abort_seconds" in told:
        transport.ABORT_SECONDS = told["abort_seconds"]
    run = Run(32, 8, 3, spares=told.get("spares", 0), timeout_seconds=told.get("timeout", 600.0))
    model = small_model()
    if told.get("plain"):
        model[1] = torch.nn.Identity()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=told.get("fused"))
    put_in_place(faults, model, optimizer)

    def loss(model, batch):
        if (
            told.get("wait_for") is not None
            and run.membership.heartbeat.step == WAITS_IN_STEP
            and not run.membership.is_late
        ):
            wait_for(told["wait_for"])
        if told.get("pause"):
            time.sleep(told["pause"])
        return classify(model, batch)

    thaws = [Thaw(), EMA(0.9)] if told.get("thaws") else []
    model[0].requires_grad_(not thaws)
    with Trainer(
        run,
        model,
        optimizer,
        loss,
        hooks=[*thaws, Ends(faults)],
        run_dir=folder,
        digest_every=told.get("digest_every", 1),
        checkpoint_steps=told.get("checkpoint_steps", 3),
        max_grad_norm=1.0,
        best=told.get("best"),
        checkpoint_minutes=None,
        **told.get("options", {}),
    ) as trainer:
        faults.step = lambda: trainer.step.num_steps
        between_steps(trainer, faults)
        samples = Samples(103, faults.strike)
        streams = [
            Subset(samples, range(first, stop)) for first, stop in pairwise((0, 20, 25, 40, 55, 70, 70, 91, 103))
        ]
        trainer.fit(
            run.loader(streams=lambda index, count: streams[index]) if told.get("streams") else samples,
            told.get("epochs", 3),
            eval_data=small_images(23),
            metrics={"accuracy": accuracy},
            resume=told.get("resume"),
            num_workers=told.get("num_workers", 0),
        )
        faults.strike("end")
        ended = {
            "digest": trainer.digest,
            "history": [[r.train_loss.hex(), r.eval["accuracy"]] for r in trainer.history],
        }
    (folder.parent / f"ended-{slot}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
