"""The subject of a forecast: a model with its loss, its batches and its optimizer, and what its layers repeat."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.engine.losses import Mean

HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "n_kv_heads", "kv_heads")


@dataclass(frozen=True)
class Subject:
    """What is to be trained.

    Attributes:
        name: as the user gave it.
        build: makes the model.
        loss: `loss(model, batch)` under the loss contract (see `samestep.engine.losses`).
        make_batch: makes a batch of so many samples; its values do not matter.
        optimizer: "sgd", "adam" or "adamw".
        settings: further arguments of the optimizer.
        global_batch_size: samples of a step.
        units: how many of `unit` a sample holds.
        unit: what speed is told in: "samples", "images", "tokens".
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor | Mean]
    make_batch: Callable[[int], Any]
    optimizer: str = "adamw"
    settings: Mapping[str, Any] = field(default_factory=dict)
    global_batch_size: int = 64
    units: int = 1
    unit: str = "samples"


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: the children, two at least and of one class, of the list that holds the most parameters.

    FSDP2 wraps them one by one, pipelines are cut between them, activation checkpointing recomputes each.
    """
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        children = list(module.children())
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(children) < 2:
            continue
        if len({type(child) for child in children}) > 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > most:
            best, most = children, size
    return best


def sections(model: nn.Module, blocks: list[nn.Module]) -> dict[str, int]:
    """The section of each parameter: 0 before the blocks, 1 … n in them, n + 1 after; in the order of registration."""
    inside = {id(p): number for number, block in enumerate(blocks, 1) for p in block.parameters()}
    found, seen = {}, False
    for name, parameter in model.named_parameters():
        seen = seen or id(parameter) in inside
        found[name] = inside.get(id(parameter), len(blocks) + 1 if seen else 0)
    return found


def split_parameters(model: nn.Module, blocks: list[nn.Module]) -> dict[str, nn.Parameter]:
    """The matrices that tensor parallelism divides: those of the blocks, the token embedding and the head.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3: pairs of linear layers, the first cut by columns and the
    second by rows, and the embedding by words.
    """
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    words = max((table.num_embeddings for table in tables), default=0)
    outside = {id(table.weight) for table in tables if table.num_embeddings == words}
    outside |= {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == words}
    chosen = inside | outside if inside else set()
    return {name: p for name, p in model.named_parameters() if id(p) in chosen}


def tensor_limit(model: nn.Module, matrices: Iterable[Tensor]) -> list[int]:
    """The numbers that the tensor-parallel devices must divide: sizes of the matrices, and numbers of heads."""
    sizes = {size for matrix in matrices for size in matrix.shape}
    heads = {getattr(module, name) for module in model.modules() for name in HEADS if hasattr(module, name)}
    return sorted(sizes | {value for value in heads if isinstance(value, int)})
