"""The workloads of the benchmarks: four small models in plain PyTorch, with data drawn from a seed.

All entrants use the same model, optimizer, loss and data of a workload.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

STEPS_AN_EPOCH = 200
WARM_UP_STEPS = 6
SEED = 0


@dataclass(frozen=True)
class Workload:
    """A model with its optimizer, loss and data.

    Attributes:
        name: W1 … W4.
        title: its description in tables.
        global_batch_size: samples per optimizer step of all processes.
        make_model: a new model.
        make_optimizer: its optimizer, given the parameters.
        loss: of outputs and targets; a mean over all of them.
        draw: from a number of samples and a generator, inputs and targets.
    """

    name: str
    title: str
    global_batch_size: int
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]

    def data(self, steps: int = STEPS_AN_EPOCH) -> tuple[Tensor, Tensor]:
        """Inputs and targets for an epoch with this number of steps, drawn from a fixed seed."""
        return self.draw(steps * self.global_batch_size, torch.Generator().manual_seed(SEED))

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a model on a batch."""
        inputs, targets = batch
        return self.loss(model(inputs), targets)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset; no `TensorDataset`, since samestep would read that one's tensors directly."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class Task:
    """The command line of an entrant.

    Attributes:
        workload: the workload to train.
        num_processes: the number of processes that train together.
        inputs: all samples.
        targets: the targets of all samples.
        gate: the socket of the contest; None to run without turns.
        warm_up: the steps before the first wait.
        options: all parsed options.
    """

    workload: Workload
    num_processes: int
    inputs: Tensor
    targets: Tensor
    gate: str | None
    warm_up: int
    options: argparse.Namespace

    @property
    def dataset(self) -> Samples:
        """All samples, one at a time."""
        return Samples(self.inputs, self.targets)

    @property
    def local_batch_size(self) -> int:
        """Samples of one process and step."""
        return self.workload.global_batch_size // self.num_processes


def task(add_options: Callable[[argparse.ArgumentParser], object] | None = None) -> Task:
    """Reads the command line of an entrant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--processes", type=int, default=1, help="how many processes train together")
    parser.add_argument("--data", type=Path, help="a file of data that was drawn before; drawn anew by default")
    parser.add_argument("--gate", help="the socket at which to wait for a turn; by default it runs freely")
    parser.add_argument("--warm-up", type=int, default=WARM_UP_STEPS, help="steps before the first wait")
    parser.add_argument("--num-threads", type=int, help="of each process; as many as torch takes by default")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    workload = WORKLOADS[options.workload]
    # Read by mapping: the processes of all entrants share one copy.
    inputs, targets = torch.load(options.data, mmap=True, weights_only=True) if options.data else workload.data()
    torch.manual_seed(SEED)
    return Task(workload, options.processes, inputs, targets, options.gate, options.warm_up, options)


def lenet() -> nn.Sequential:
    """The recipe `lenet`: two convolutions with average pooling, two linear layers; 129,068 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def net1() -> nn.Sequential:
    """13 features → 16 → 32 → 1; 801 parameters."""
    return nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network, each added to its input; `[N, T, width]` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, T, width]` -> `[N, T, width]`."""
        samples, length, width = x.shape
        split = self.queries_keys_values(self.attention_norm(x)).view(samples, length, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(samples, length, width))
        fed: Tensor = self.feed(self.feed_norm(x))
        return x + fed


class Gpt(nn.Module):
    """Tokens `[N, 64]` to scores of each next token `[N, 64, 65]`; 4 layers, 128 wide, 4 heads (after GPT-2, 2019)."""

    def __init__(self, vocabulary: int = 65, context: int = 64, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """int64 `[N, T]` -> `[N, T, 65]`."""
        scores: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions[: x.shape[1]])))
        return scores


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm, added to their input; `[N, C, H, W]` in and out (after He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` -> `[N, C, H, W]`."""
        return functional.relu(x + self.body(x))


def residual_cnn() -> nn.Sequential:
    """3×32×32 → 16 maps → 32 maps 16×16 → 64 maps 8×8 → 10 scores; three residual blocks with batch norm."""
    layers: list[nn.Module] = []
    before = 3
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        layers += [nn.Conv2d(before, channels, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(channels)]
        layers += [nn.ReLU(), Residual(channels)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def _images(shape: tuple[int, ...]) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, *shape, generator=generator)
        return images, torch.randint(0, 10, (count,), generator=generator)

    return draw


def _table(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    features = torch.randn(count, 13, generator=generator)
    return features, features[:, :3].sum(1, keepdim=True) + torch.randn(count, 1, generator=generator)


def _tokens(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    windows = torch.randint(0, 65, (count, 65), generator=generator)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="W1",
            title="LeNet, 28×28, batch 256, SGD",
            global_batch_size=256,
            make_model=lenet,
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            loss=functional.cross_entropy,
            draw=_images((1, 28, 28)),
        ),
        Workload(
            name="W2",
            title="MLP 13-16-32-1, batch 128, SGD",
            global_batch_size=128,
            make_model=net1,
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
            loss=functional.mse_loss,
            draw=_table,
        ),
        Workload(
            name="W3",
            title="GPT, 4 layers, 128 wide, context 64, batch 32, AdamW",
            global_batch_size=32,
            make_model=Gpt,
            make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            loss=_token_loss,
            draw=_tokens,
        ),
        Workload(
            name="W4",
            title="residual CNN with BatchNorm, 32×32, batch 64, SGD with momentum",
            global_batch_size=64,
            make_model=residual_cnn,
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            loss=functional.cross_entropy,
            draw=_images((3, 32, 32)),
        ),
    )
}
