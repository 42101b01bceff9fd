"""The diagnosis: where in a model an operation was called that has no deterministic form, or needs more samples."""

import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.nested import leaves
from samestep.errors import DeterminismError, UsageError

LONE_SAMPLE = "Expected more than 1 value per channel when training"
PATTERN = re.compile(r"(\S+) does not have a deterministic implementation")


def explain_nondeterminism(
    error: RuntimeError, model: nn.Module, forward: Callable[[], Tensor]
) -> DeterminismError | None:
    """Turns torch's error about an operation without a deterministic form into one that names the module."""
    match = PATTERN.search(str(error))
    if match is None:
        return None
    where = _module_in_traceback(error.__traceback__, model) or _module_of_backward(model, forward)
    return DeterminismError(
        f"{match.group(1)} has no deterministic form on this device, and was called in {where}; replace it, or give up "
        'equal bits with samestep.Run(reduction="native") (--reduction native)'
    )


def explain_lone_sample(error: BaseException, model: nn.Module, where: str, advice: str) -> UsageError | None:
    """Turns torch's error about BatchNorm in training on one sample into one that names the module and the batch."""
    if LONE_SAMPLE not in str(error):
        return None
    module = _module_in_traceback(error.__traceback__, model) or "BatchNorm"
    return UsageError(
        f"{module} needs two samples or more in training, and {where} has one: leave out a shorter last batch "
        f"(drop_last=True), or {advice}"
    )


def _module_in_traceback(traceback: TracebackType | None, model: nn.Module) -> str | None:
    """The innermost module of the model whose forward is on the stack."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = f"module {names[id(owner)] or type(owner).__name__} ({type(owner).__name__})"
        traceback = traceback.tb_next
    return found


def _module_of_backward(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Runs forward and backward again, and sees which module's backward is the last to begin.

    The gradients are not accumulated, so that hooks on the parameters do not run.
    """
    owners: dict[Any, str] = {}
    running: list[str] = []

    def label(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for node in _new_nodes(output, owners):
                owners[node] = f"the backward of module {name or type(module).__name__} ({type(module).__name__})"
                node.register_prehook(lambda grads, owner=owners[node]: running.append(owner))

        return hook

    handles = [module.register_forward_hook(label(name)) for name, module in model.named_modules()]
    loss = None
    try:
        loss = forward()
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    except RuntimeError:
        if loss is None:
            return "the loss function"
        return running[-1] if running else "the backward of the loss function"
    finally:
        for handle in handles:
            handle.remove()
    return f"a backward that does not fail again (torch {torch.__version__}, Python {sys.version_info.major})"


def _new_nodes(output: Any, known: dict[Any, str]) -> list[Any]:
    """The autograd nodes behind a module's output that no inner module has claimed."""
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found: list[Any] = []
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in known or node in seen:
            continue
        seen.add(node)
        found.append(node)
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return found
