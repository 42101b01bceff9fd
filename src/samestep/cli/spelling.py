"""The spelling of options: with hyphens; with underscores too, as torchrun takes them, which no help has to list."""

from collections.abc import Mapping
from typing import Any, Final


def with_hyphens(name: str) -> str:
    """`nproc_per_node` as `nproc-per-node`."""
    return name.replace("_", "-")


SPELLINGS: Final[Mapping[str, Any]] = {"token_normalize_func": with_hyphens}
"""What commands are registered with, so that both spellings are the same option."""
