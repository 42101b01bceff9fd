"""Saves the tensors of a replayed step as safetensors, with an index in JSON."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import RunFolderError, UsageError
from samestep.train.checkpoint.tensors import DTYPES, write_tensors

INDEX_FILE = "index.json"
STEP_FILE = "step.safetensors"


def check_folder(folder: Path, run: Path) -> None:
    """Raises a `UsageError` unless `--save` names a new or empty folder outside of the run's."""
    if folder.resolve().is_relative_to(run.resolve()):
        raise UsageError(f"got --save {folder}, which is in the run's own folder; a replay changes nothing there")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"got --save {folder}, which is there already; name a new or an empty folder")


class Saver:
    """Writes a file a microbatch, one for the step, and the index of them all to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._index: dict[str, dict[str, Any]] = {}

    def add(self, file: str, name: str, tensor: Tensor, **facts: Any) -> None:
        """Copies a tensor to host memory, to be written to a file; notes one that safetensors cannot hold."""
        tensors = self._tensors.setdefault(file, {})
        entry = self._index.setdefault(file, {"tensors": {}, "left_out": []})
        if tensor.layout != torch.strided or tensor.is_nested or tensor.dtype not in DTYPES:
            entry["left_out"].append(name)
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            value = tensor.detach().resolve_conj().resolve_neg()
            # a copy in any case: the next module may write to the tensor in place
            tensors[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        dtype = str(value.dtype).removeprefix("torch.")
        entry["tensors"][name] = {**facts, "shape": list(value.shape), "dtype": dtype}

    def write(self, file: str, **facts: Any) -> None:
        """Writes a file, and frees its tensors."""
        entry = self._index.setdefault(file, {"tensors": {}, "left_out": []})
        self._index[file] = {**facts, **entry}
        tensors = self._tensors.pop(file, {})
        self._attempt(self._folder / file, lambda path: write_tensors(path, tensors))

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Writes the step's file, and the index with these facts."""
        self.write(STEP_FILE)
        text = json.dumps({**facts, "files": self._index}, indent=2, ensure_ascii=False) + "\n"
        self._attempt(self._folder / INDEX_FILE, lambda path: path.write_text(text, encoding="utf-8"))

    def _attempt(self, path: Path, write: Callable[[Path], object]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            reason = f"cannot write {path}: {error.strerror or error}"
            raise RunFolderError(f"{reason}; choose another folder with --save") from error
