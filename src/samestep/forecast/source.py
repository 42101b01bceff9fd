"""The source of a model: a published shape by name, or a function of the user's."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from samestep.errors import UsageError
from samestep.forecast.shapes import NAMES, published
from samestep.forecast.subject import Subject

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def read_shape(text: str, option: str) -> tuple[int, ...]:
    """Reads `3,224,224`; an empty text is a sample that is a single number.

    Raises:
        UsageError: these are no sizes.
    """
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise UsageError(f"got {option} {text!r}; needed: the sizes of one sample, such as 3,224,224")
    return sizes


def find_subject(
    name: str,
    recipes: Sequence[str],
    input_shape: str | None,
    input_dtype: str,
    target_shape: str | None,
    target_dtype: str,
) -> Subject:
    """The subject that a user names, but for recipes.

    Args:
        name: one of `shapes.NAMES`, `FILE.py:function` or `package.module:function`. The function returns a model, or
            (model, loss function, batch): any nested value of tensors, samples along dim 0.
        recipes: names that there are as well, for the message.
        input_shape: sizes of one sample, where the function returns a model alone.
        input_dtype: of the sample.
        target_shape: of one sample's target; without it the loss is the sum of the outputs.
        target_dtype: an integer one is for classes along the last dim, else the targets are compared by their squares.

    Raises:
        UsageError: there is no such thing.
    """
    if name in NAMES:
        return published(name)
    if ":" not in name:
        known = (*recipes, *NAMES)
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"there is no model {name!r}; {hint}needed: one of {', '.join(known)}, or FILE.py:function or "
            "package.module:function that returns an nn.Module"
        )
    build = _find_function(name)
    for dtype in (input_dtype, target_dtype):
        if dtype not in DTYPES:
            raise UsageError(f"there is no dtype {dtype!r} for samples; it is one of {', '.join(DTYPES)}")
    if input_shape is not None:
        shape = read_shape(input_shape, "--input-shape")
        target = None if target_shape is None else read_shape(target_shape, "--target-shape")
        return _from_model(name, build, shape, DTYPES[input_dtype], target, DTYPES[target_dtype])
    return _from_triple(name, build)


def _find_function(name: str) -> Callable[[], Any]:
    place, _, function = name.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"got {name!r}: {error}; give the file, FILE.py:function, or a module that is installed"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        raise UsageError(f"{place} has no function {function!r}; it has {', '.join(own) or 'none'}")
    build: Callable[[], Any] = found
    return build


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"got {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    with _importable(path.resolve().parent):  # as for a script: what lies beside it can be imported
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> Any:
    with _importable(Path.cwd()):  # as for `python -m`
        return importlib.import_module(name)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _from_model(
    name: str,
    build: Callable[[], Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    target: tuple[int, ...] | None,
    target_dtype: torch.dtype,
) -> Subject:
    def make_batch(count: int) -> Any:
        x = torch.zeros(count, *shape, dtype=dtype)
        return (x, None) if target is None else (x, torch.zeros(count, *target, dtype=target_dtype))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        scores = model(x)
        if y is None:
            return sum((part.float().sum() for part in _tensors(scores)), torch.zeros(()))
        if y.is_floating_point():
            return functional.mse_loss(scores, y)
        return functional.cross_entropy(scores.flatten(0, -2) if y.ndim > 1 else scores, y.flatten())

    def build_checked() -> nn.Module:
        return _as_model(name, build())

    return Subject(name, build_checked, loss, make_batch)


def _from_triple(name: str, build: Callable[[], Any]) -> Subject:
    def parts() -> tuple[nn.Module, Any, Any]:
        made = build()
        if isinstance(made, nn.Module):
            raise UsageError(
                f"{name} returns a model alone; say what goes in by --input-shape (and --target-shape), or return "
                "(model, loss_fn, batch)"
            )
        if not isinstance(made, tuple) or len(made) != 3:
            raise UsageError(
                f"{name} returns a {type(made).__name__}; needed: an nn.Module, or (model, loss_fn, batch)"
            )
        return _as_model(name, made[0]), made[1], made[2]

    # A batch is asked for after the model was built, under the same mode.
    return Subject(
        name,
        lambda: parts()[0],
        lambda model, batch: batch[0](model, batch[1]),
        lambda count: (*(made := parts())[1:2], _resized(made[2], count)),
    )


def _resized(value: Any, count: int) -> Any:
    """The same nested value with so many samples."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.new_zeros((count, *tensor.shape[1:])), value)


def _as_model(name: str, made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise UsageError(f"{name} returns a {type(made).__name__}; needed: an nn.Module, or (model, loss_fn, batch)")
    return made


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
