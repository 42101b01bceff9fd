"""Training loops of one's own with the given faults: `faulty_loops.py JSON`.

JSON holds "kind" (one of `KINDS`, or "slow", which waits for a third worker), "folder" and "faults", as in
`faulty_training`.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from faulty_training import Faults, Samples, put_in_place
from programs import classify, small_images, small_model
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from samestep.checkpoint.digest import state_digest
from samestep.comm.environment import read_settings
from samestep.comm.heartbeat import HeartbeatPage
from samestep.metrics import accuracy
from samestep.run.run import Run

EPOCHS = 2


class Stream(IterableDataset):
    """The samples one after another."""

    def __init__(self, samples):
        self._samples = samples

    def __iter__(self):
        return (self._samples[index] for index in range(len(self._samples)))


def drawn_by_user(run, samples, num_workers):
    """A loader that the script shuffles itself, with a generator of its own."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(samples, batch_size=32, shuffle=True, generator=generator, num_workers=num_workers)


def wait_for_start(page, slot):
    """Waits until the worker that was started last, in slot 2, has failed; itself, it does not wait."""
    deadline = time.monotonic() + 60
    while slot != 2 and page.beat(2).phase != "end" and time.monotonic() < deadline:
        time.sleep(0.01)


def shared_loss(model, batch, counts):
    """A loss with a denominator that belongs to the global batch."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / counts


LOADERS = {
    "stream": lambda run, samples: run.loader(Stream(samples)),
    "num_workers": lambda run, samples: run.loader(samples, shuffle=True, num_workers=2),
    "user's loader": lambda run, samples: drawn_by_user(run, samples, 0),
    "user's loader, num_workers": lambda run, samples: drawn_by_user(run, samples, 2),
}
OPTIONS = {
    "small buckets": {"bucket_bytes": 256},
    "counts": {"counts_fn": lambda batch: torch.tensor(float(len(batch[1])))},
    "16-mixed": {"precision": "16-mixed", "max_grad_norm": 0.5},
}
KINDS = (*LOADERS, *OPTIONS, "plain", "scheduler", "gan", "checkpoints")


def train(run, kind, faults, folder):
    """One loop over the data, whatever the kind: steps, evaluation, and predictions at the end."""
    model, critic = small_model(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if faults is not None:
        put_in_place(faults, model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def against_critic(model, batch):
        with torch.no_grad():
            wanted = critic(batch[0]).softmax(1)
        return functional.cross_entropy(model(batch[0]), wanted)

    loss = {"counts": shared_loss, "gan": against_critic}.get(kind, classify)
    step = run.train_step(model, optimizer, loss, **OPTIONS.get(kind, {}))
    steps = [step]
    if kind == "gan":
        other = torch.optim.SGD(critic.parameters(), lr=0.1)
        steps.append(run.train_step(critic, other, classify))
    strike = (lambda _: None) if faults is None else faults.strike
    if faults is not None:
        faults.step = lambda: step.num_steps
    loader = LOADERS.get(kind, lambda run, samples: run.loader(samples, shuffle=True))(run, Samples(103, strike))
    told = []
    page = HeartbeatPage.from_environment()
    for epoch in range(EPOCHS):
        for batch in loader:
            told += [[result.loss.hex(), result.grad_norm.hex()] for result in [each(batch) for each in steps]]
            if kind == "slow" and page is not None and step.num_steps == 3:
                wait_for_start(page[0], run.membership.heartbeat.slot)
            if kind == "scheduler":
                scheduler.step()
            if kind == "checkpoints":
                run.save_checkpoint(folder / "checkpoints", steps, loader, {"epoch": epoch})
        told.append(run.evaluate(model, small_images(23), {"accuracy": accuracy})["accuracy"])
    strike("end")
    outputs = run.predict(model, small_images(23))
    told.append(outputs.double().sum().item().hex())
    return state_digest(nn.ModuleList([model, critic]), optimizer), told


def main():
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"]).parent
    slot = read_settings().slot
    run = Run(32, 8, 3)
    digest, told = train(run, asked["kind"], Faults(asked["faults"], slot, folder), folder)
    (folder / f"ended-{slot}.json").write_text(json.dumps({"digest": digest, "history": told}))


if __name__ == "__main__":
    main()
