"""The names: what parameters are called in the models that hold them, found without asking the program."""

import gc
from collections.abc import Iterable, Mapping

from torch import nn

WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel")
WRAPPED_NAMES = ("module", "_orig_mod", "_fsdp_wrapped_module")


def roots() -> list[nn.Module]:
    """The modules of this process that no other module holds, unwrapped, in the order in which they were made."""
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    held = {id(child) for module in modules for child in module.children()}
    return [unwrapped(module) for module in modules if id(module) not in held]


def unwrapped(module: nn.Module) -> nn.Module:
    """The model in a wrapper such as DistributedDataParallel; the module itself where it is none."""
    while type(module).__name__ in WRAPPERS:
        inner = next(
            (found for name in WRAPPED_NAMES if isinstance(found := getattr(module, name, None), nn.Module)), None
        )
        if inner is None:
            break
        module = inner
    return module


def parameter_names(models: Iterable[nn.Module]) -> Mapping[int, str]:
    """The dotted name of every parameter, by its identity; with several models the first to hold it names it."""
    names: dict[int, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), name)
    return names
