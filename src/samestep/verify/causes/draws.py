"""Causes in the random numbers of a forward or a loss: dropout, and draws by hand."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from samestep.engine.site import script_line
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence, listed
from samestep.verify.causes.notes import Notes, Wrap, by_script, wrapped

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
TORCH_DRAWS = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "randperm")
TENSOR_DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")
NUMPY_DRAWS = ("rand", "randn", "random", "uniform", "normal", "randint", "standard_normal", "permutation", "beta")
PYTHON_DRAWS = ("random", "uniform", "gauss", "randint", "randrange", "betavariate")


def listen(notes: Notes) -> list[Wrap]:
    """Dropout in training, and draws by the script once its model runs."""
    dropouts = [Wrap(F, name, _watching_dropout(notes, name)) for name in DROPOUTS]
    attention = Wrap(F, "scaled_dot_product_attention", _watching_attention(notes))
    places: list[tuple[Any, str, str]] = [
        *((torch, name, f"torch.{name}") for name in TORCH_DRAWS),
        *((Tensor, name, f"Tensor.{name}") for name in TENSOR_DRAWS),
        *((np.random, name, f"numpy.random.{name}") for name in NUMPY_DRAWS),
        *((random, name, f"random.{name}") for name in PYTHON_DRAWS),
    ]
    draws = [Wrap(owner, name, _watching_draw(notes, title)) for owner, name, title in places]
    return [*dropouts, attention, *draws]


def _watching_dropout(notes: Notes, name: str) -> Callable[[Any], Any]:
    def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drop(input: Tensor, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any) -> Tensor:
            if training and p > 0 and torch.is_grad_enabled():
                notes.count("dropout", module=notes.calls.name() or name, p=p, rows=input.shape[0] if input.ndim else 0)
            return inner(input, p, training, *args, **kwargs)

        return drop

    return make


def _watching_attention(notes: Notes) -> Callable[[Any], Any]:
    def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            *args: Any,
            **kw: Any,
        ) -> Tensor:
            if dropout_p > 0 and torch.is_grad_enabled():
                notes.count("dropout", module=notes.calls.name(), p=dropout_p, rows=query.shape[0])
            return inner(query, key, value, attn_mask, dropout_p, *args, **kw)

        return attention

    return make


def _watching_draw(notes: Notes, title: str) -> Callable[[Any], Any]:
    def make(inner: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            value = inner(*args, **kwargs)
            if kwargs.get("generator") is not None or notes.in_dataset or not notes.calls.roots:
                return value
            if by_script():
                size = value.numel() if isinstance(value, Tensor) else int(np.size(value))
                notes.count("draw", function=title, line=script_line(), numbers=size)
            return value

        return draw

    return make


def _suspect_dropout(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    found = sorted({(fact["module"], fact["p"]) for _, _, fact in evidence.facts("dropout")})
    if not found or not evidence.shared:
        return None
    modules = listed([f"{module} (p={p:g})" for module, p in found])
    return f"dropout was drawn in training, in {modules}, from each device's own stream of random numbers"


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Nothing is dropped."""

    def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drop(input: Tensor, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any) -> Tensor:
            return inner(input, 0.0, training, *args, **kwargs)

        return drop

    def make_attention(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            *args: Any,
            **kw: Any,
        ) -> Tensor:
            return inner(query, key, value, attn_mask, 0.0, *args, **kw)

        return attention

    with wrapped(*(Wrap(F, name, make) for name in DROPOUTS), Wrap(F, "scaled_dot_product_attention", make_attention)):
        yield


def _suspect_draws(evidence: Evidence) -> str | None:
    if not evidence.is_ddp or not evidence.shared:
        return None
    found = {(fact["function"], fact["line"]): fact["numbers"] for _, _, fact in evidence.facts("draw")}
    if not found:
        return None
    (function, line), numbers = next(iter(found.items()))
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{function} at {line} drew {numbers} numbers a call from each device's own stream{more}"


@contextmanager
def _without_draws() -> Iterator[None]:
    """What the script draws after its optimizer was made, outside of datasets, is a constant."""
    made: list[bool] = []

    def note(inner: Callable[..., None]) -> Callable[..., None]:
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            inner(self, *args, **kwargs)
            made.append(True)

        return init

    def constant(name: str) -> Callable[[Any], Any]:
        level = levels.get(name, 0.0)

        def make(inner: Callable[..., Any]) -> Callable[..., Any]:
            def draw(*args: Any, **kwargs: Any) -> Any:
                value = inner(*args, **kwargs)
                if kwargs.get("generator") is not None or not made or not by_script():
                    return value
                return value.sort().values if name == "randperm" else _levelled(value, level)

            return draw

        return make

    halves = ("rand", "rand_like", "uniform", "uniform_", "random", "beta", "betavariate")
    levels = {**dict.fromkeys(halves, 0.5), "exponential_": 1.0}
    places: Sequence[tuple[Any, tuple[str, ...]]] = (
        (torch, TORCH_DRAWS),
        (Tensor, TENSOR_DRAWS),
        (np.random, NUMPY_DRAWS),
        (random, PYTHON_DRAWS),
    )
    draws = [Wrap(owner, name, constant(name)) for owner, names in places for name in names]
    with wrapped(Wrap(Optimizer, "__init__", note), *draws):
        yield


def _levelled(value: Any, level: float) -> Any:
    """A value of the same kind with the same number everywhere."""
    if isinstance(value, Tensor):
        return value.detach().fill_(level)
    if isinstance(value, np.ndarray):
        return (
            np.sort(value)
            if value.dtype.kind in "iu" and level == 0 and value.ndim == 1
            else np.full_like(value, level)
        )
    return type(value)(level)


DROPOUT = Cause(
    "dropout",
    "dropout follows each device's own stream of random numbers",
    "Nothing in DistributedDataParallel mends it; samestep.Run and samestep run seed every generator by (seed, step, "
    "microbatch), so that masks do not depend on the devices.",
    _suspect_dropout,
    _without_dropout,
)
DRAWS = Cause(
    "draws",
    "the forward or the loss draws random numbers from each device's own stream",
    "Draw for the whole batch on every device and take this device's rows, or use samestep.Run, which seeds the "
    "generators for every microbatch.",
    _suspect_draws,
    _without_draws,
)
