"""The picture of the README, from real runs: `python tools/pictures.py`, in a checkout, writes it into `docs/`.

Kernels are portable: the curves are those of any x86-64 CPU with AVX2.

`same_bits.svg` has the test loss of one script, DistributedDataParallel as its tutorial writes it, on 1, 2 and 3 CPU
workers: as so many processes of torchrun, and as three logical devices of samestep.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from samestep.devices.portable import portable_variables
from samestep.text import counted

DOCS = Path(__file__).resolve().parent.parent / "docs"
BATCH_SIZE, EPOCHS, LEARNING_RATE, NUM_TRAIN = 60, 30, 0.1, 997
COUNTS = (1, 2, 3)
FIRST_SHOWN = 5  # of the epochs: before, the losses fall from far above
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{}"),
    "samestep run --logical-devices 3": (
        *(sys.executable, "-m", "samestep", "run", "--portable", "--logical-devices", "3", "--devices", "cpu:{}"),
    ),
}


def digits() -> tuple[Any, Any]:
    """Images `[1797, 64]` and classes `[1797]` of scanned digits."""
    import torch
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def network() -> Any:
    """A small network with batch norm and dropout."""
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))


def train() -> list[float]:
    """The test loss after each epoch."""
    import torch
    from torch import distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, classes = digits()
    train = TensorDataset(images[:NUM_TRAIN], classes[:NUM_TRAIN])
    sampler: Any = DistributedSampler(train)
    loader = DataLoader(train, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            losses.append(cross_entropy(net.module(images[NUM_TRAIN:]), classes[NUM_TRAIN:]).item())
    dist.destroy_process_group()
    return losses


def measured(launcher: tuple[str, ...], count: int) -> list[float]:
    """The test losses of this script by a launcher, on so many CPU workers."""
    words = [word.format(count) for word in launcher]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "losses.json")
        env = {**os.environ, **portable_variables("cpu", True)}
        subprocess.run([*words, __file__, str(file)], check=True, env=env)
        return [float(loss) for loss in json.loads(file.read_text())]


def draw_curves(path: Path) -> None:
    """Draws the curves by both launchers side by side."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "samestep", "font.size": 10})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, (name, launcher) in zip(axes, LAUNCHERS.items(), strict=True):
        found = {count: measured(launcher, count) for count in COUNTS}
        for count, style, width in zip(COUNTS, ("-", "--", ":"), (3.5, 2.2, 2.2), strict=True):
            label = f"{counted(count, 'device')}: {found[count][-1]:.7f}"
            shown = found[count][FIRST_SHOWN - 1 :]
            axis.plot(range(FIRST_SHOWN, EPOCHS + 1), shown, style, linewidth=width, label=label)
        assert all(losses == found[1] for losses in found.values()) == name.startswith("samestep")
        axis.set(title=name, xlabel="epoch")
        axis.legend(title="test loss at the end", frameon=False)
    axes[0].set_ylabel("test loss")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Writes the picture; as a process of the script, its losses."""
    if len(sys.argv) == 2:
        losses = train()
        if os.environ["RANK"] == "0":
            Path(sys.argv[1]).write_text(json.dumps(losses))
        os._exit(0)  # at the interpreter's end a thread of torch may abort the process (pytorch/pytorch#38228)
    draw_curves(DOCS / "same_bits.svg")


if __name__ == "__main__":
    main()
