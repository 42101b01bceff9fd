"""The saving of a replayed step: inputs, outputs, gradients and the batch as safetensors, with an index in JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from samestep.data.nested import leaves
from samestep.errors import RunFolderError, UsageError
from samestep.replay.views import Place
from samestep.train.checkpoint.tensors import DTYPES, write_tensors

INDEX_FILE = "index.json"
STEP_FILE = "step.safetensors"


def check_folder(folder: Path, run: Path) -> None:
    """Raises a `UsageError` unless a replay may write to this folder: a new or empty one, outside of the run's."""
    if folder.resolve().is_relative_to(run.resolve()):
        raise UsageError(f"got --save {folder}, which is in the run's own folder; a replay changes nothing there")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"got --save {folder}, which is there already; name a new or an empty folder")


@dataclass
class Part:
    """What is to be in one file.

    Attributes:
        tensors: by name, in host memory.
        entries: what the index says of each.
        left_out: names of tensors that safetensors cannot hold.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, **facts: Any) -> None:
        """Copies a tensor to host memory under a name."""
        if tensor.layout != torch.strided or tensor.is_nested or tensor.dtype not in DTYPES:
            self.left_out.append(name)
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            value = tensor.detach().resolve_conj().resolve_neg()
            self.tensors[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        self.entries[name] = {
            **facts,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
        }


class Saver:
    """Writes one file a microbatch, one for the whole step, and the index of them all.

    Args:
        folder: to write to; made if it is not there.

    Attributes:
        step: what belongs to the whole step.
        microbatch: what belongs to the microbatch that runs.
    """

    def __init__(self, folder: Path) -> None:
        self.step = Part()
        self.microbatch = Part()
        self._folder = folder
        self._index: dict[str, dict[str, Any]] = {}

    def keep(self, place: Place, kind: Literal["value", "gradient"], tensor: Tensor) -> None:
        """Takes what a module took or gave, or the gradient of it."""
        facts = {"kind": kind, "module": place.module, "call": place.call, "side": place.side, "number": place.number}
        self.microbatch.add(place.name + (".gradient" if kind == "gradient" else ""), tensor, **facts)

    def keep_batch(self, value: Any) -> None:
        """Takes the tensors of a microbatch's batch, in the order in which they are nested."""
        for number, tensor in enumerate(leaf for leaf in leaves(value) if isinstance(leaf, Tensor)):
            self.microbatch.add(f"batch.{number}", tensor, kind="batch", number=number)

    def finish_microbatch(self, microbatch: int, samples: Sequence[int]) -> None:
        """Writes the file of a microbatch."""
        part, self.microbatch = self.microbatch, Part()
        self._write(
            f"microbatch-{microbatch:05d}.safetensors", part, {"microbatch": microbatch, "samples": list(samples)}
        )

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Writes what belongs to the whole step, and the index with these facts; raises as `finish_microbatch` does."""
        self._write(STEP_FILE, self.step, {})
        text = json.dumps({**facts, "files": self._index}, indent=2, ensure_ascii=False)
        try:
            (self._folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self._folder / INDEX_FILE, error) from error

    def _write(self, file_name: str, part: Part, facts: Mapping[str, Any]) -> None:
        path = self._folder / file_name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_tensors(path, part.tensors)
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._index[file_name] = {**facts, "tensors": part.entries, "left_out": part.left_out}


def _cannot_write(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"cannot write {path}: {error.strerror or error}; choose another folder with --save")
