"""The pictures of the README, from real runs: `python tools/pictures.py`, in a checkout, writes them into `docs/`.

Kernels are portable: digests and curves are those of any x86-64 CPU with AVX2.

`same_bits.svg` has the test loss of one small network by two programs, each in 1, 2 and 3 processes on CPUs:
DistributedDataParallel as its tutorial writes it, and samestep. `terminal.svg` has commands and what they print.
"""

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from samestep.devices.portable import portable_variables

DOCS = Path(__file__).resolve().parent.parent / "docs"
BATCH_SIZE, EPOCHS, LEARNING_RATE, NUM_TRAIN = 60, 30, 0.1, 997
WORLD_SIZES = (1, 2, 3)
FIRST_SHOWN = 5  # of the epochs: before, the losses fall from far above
PROGRAMS = {"ddp": "DistributedDataParallel", "samestep": "samestep"}
COMMANDS = (
    "samestep train lenet --epochs 3 --devices cpu:1 --run-dir runs/one",
    "samestep train lenet --epochs 3 --devices cpu:3 --run-dir runs/three",
    "samestep ledger diff runs/one runs/three",
    "samestep verify --portable --devices cpu:1,cpu:2 ddp.py",
)
DDP_SCRIPT = """
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(240, 8)
y = (x.sum(1) > 0).long()
net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rank, world_size = dist.get_rank(), dist.get_world_size()
for first in range(0, 240, 24):
    mine = slice(first + rank, first + 24, world_size)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x[mine]), y[mine]).backward()
    optimizer.step()
"""
COLUMNS = 112


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


def train_by_ddp() -> list[float]:
    """The test loss after each epoch, by DistributedDataParallel."""
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


def train_by_samestep() -> list[float]:
    """The same by samestep."""
    import torch
    from torch.nn.functional import cross_entropy

    import samestep

    run = samestep.Run(BATCH_SIZE, num_microbatches=max(WORLD_SIZES), seed=0)
    images, classes = digits()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    step = run.train_step(net, optimizer, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    loader = run.loader((images[:NUM_TRAIN], classes[:NUM_TRAIN]), shuffle=True)
    losses = []
    for _ in range(EPOCHS):
        net.train()
        for batch in loader:
            step(batch)
        net.eval()
        with torch.no_grad():
            losses.append(cross_entropy(net(images[NUM_TRAIN:]), classes[NUM_TRAIN:]).item())
    return losses


def measured(program: str, world_size: int) -> list[float]:
    """The test losses of a program in so many processes."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "losses.json")
        env = {**os.environ, **portable_variables("cpu", True)}
        subprocess.run([*torchrun, __file__, program, str(file)], check=True, env=env)
        return [float(loss) for loss in json.loads(file.read_text())]


def draw_curves(path: Path) -> None:
    """Draws the curves of both programs side by side."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "samestep", "font.size": 10})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, (program, name) in zip(axes, PROGRAMS.items(), strict=True):
        found = {world_size: measured(program, world_size) for world_size in WORLD_SIZES}
        for world_size, style, width in zip(WORLD_SIZES, ("-", "--", ":"), (3.5, 2.2, 2.2), strict=True):
            label = f"{world_size} process{'es' if world_size > 1 else ''}: {found[world_size][-1]:.7f}"
            shown = found[world_size][FIRST_SHOWN - 1 :]
            axis.plot(range(FIRST_SHOWN, EPOCHS + 1), shown, style, linewidth=width, label=label)
        is_same = all(losses == found[1] for losses in found.values())
        axis.set(title=f"{name}: {'the same bits' if is_same else 'three results'}", xlabel="epoch")
        axis.legend(title="test loss at the end", frameon=False)
    axes[0].set_ylabel("test loss")
    figure.savefig(path, metadata={"Date": None})


def printed(command: str, folder: Path) -> str:
    """What a command prints on a terminal's stdout, with its colours."""
    reader, writer = pty.openpty()
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": here, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command.split(), cwd=folder, stdout=writer, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=variables
    )
    os.close(writer)
    parts = []
    try:
        while part := os.read(reader, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    process.wait()
    return b"".join(parts).decode().replace("\r\n", "\n").rstrip()


def record_terminal(path: Path) -> None:
    """Records the commands and what they print."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as folder:
        Path(folder, "ddp.py").write_text(DDP_SCRIPT)
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "green"), (command, "bold")), soft_wrap=True)
            console.print(Text.from_ansi(printed(command, Path(folder))))
            console.print()
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # which a browser would fetch
    path.write_text(console.export_svg(title="samestep", code_format=form, unique_id="samestep"))


def main() -> None:
    """Writes the pictures; as a rank of one of the programs, its losses."""
    if len(sys.argv) == 3:
        losses = train_by_ddp() if sys.argv[1] == "ddp" else train_by_samestep()
        if os.environ["RANK"] == "0":
            Path(sys.argv[2]).write_text(json.dumps(losses))
        os._exit(0)  # at the interpreter's end a thread of torch may abort the process (pytorch/pytorch#38228)
    draw_curves(DOCS / "same_bits.svg")
    record_terminal(DOCS / "terminal.svg")


if __name__ == "__main__":
    main()
