"""The options of `samestep train`, checked at the door: torch-free, before a process is started."""

from collections.abc import Mapping
from typing import Any

from samestep.errors import UsageError

CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("sgd", "adam", "adamw"),
    "precision": ("32-true", "bf16-mixed", "16-mixed"),
    "reduction": ("ordered", "native"),
}
LEAST: Mapping[str, int] = {
    "epochs": 1,
    "num_workers": 0,
    "seed": 0,
    "momentum": 0,
    "weight_decay": 0,
    "spares": 0,
    "checkpoint_steps": 1,
    "keep": 1,
    "digest_every": 1,
}
ABOVE_ZERO = ("lr", "max_grad_norm", "checkpoint_minutes")


def check_options(options: Mapping[str, Any]) -> None:
    """Checks what the user asked for; None is the recipe's own value.

    Raises:
        UsageError: names the option, and what it takes.
    """
    for name, choices in CHOICES.items():
        value = options.get(name)
        if value is not None and value not in choices:
            raise UsageError(f"got {name} {value!r}; --{name} is one of {', '.join(choices)}")
    for name, least in LEAST.items():
        value = options.get(name)
        if value is not None and not least <= value < float("inf"):
            raise UsageError(f"got {name}={value}; {option_of(name)} must be {least} or more")
    for name in ABOVE_ZERO:
        value = options.get(name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"got {name}={value}; {option_of(name)} must be above 0")


def option_of(name: str) -> str:
    """How an argument is spelled on the command line."""
    return "--" + name.replace("_", "-")
