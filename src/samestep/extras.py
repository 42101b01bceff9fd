"""Optional packages: whether one is installed, and the message with the command that installs it."""

import importlib.util
from typing import Final

EXTRAS: Final = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "matplotlib": ("matplotlib", "plots"),
    "pynvml": ("nvidia-ml-py", "nvidia"),
    "sklearn": ("scikit-learn", "recipes"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
}
"""By import name: the package's name and the extra of samestep that installs it (pyproject.toml)."""


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or its replacement has no spec
        return False


def missing(module: str, feature: str) -> str:
    """The message for a feature that needs a package of `EXTRAS` which is not installed."""
    package, extra = EXTRAS[module]
    return f"{feature} needs {package}, which is not installed: pip install 'samestep[{extra}]'"
