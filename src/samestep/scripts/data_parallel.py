"""torch's DataParallel with its chunks split over the processes, and the same as `samestep.DataParallel`.

The functions from which scripts build a DataParallel of their own are covered too: `replicate` returns proxies of the
module, and `parallel_apply` runs each of them where its chunk is computed.

torch's class itself is patched, not replaced: classes derived from it, and references to it from before, must be split
too. A forward that nothing overrides goes to `chunked_forward` whole; one of a class with parts of its own runs torch's
code, which calls these parts and, in the place of threads on replicas, the two functions above.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import parallel as torch_parallel

from samestep.checks import check_choice, check_counts
from samestep.errors import UsageError
from samestep.patch import Patch
from samestep.scripts.script_state import ScriptState, active, num_visible
from samestep.scripts.split_forward.forward import chunked_forward, given_forward

OVERRIDABLE = ("scatter", "gather", "replicate", "parallel_apply")


class DataParallel(nn.DataParallel[Any]):
    """`torch.nn.DataParallel`, with processes instead of threads. Tier `bitwise` in the number of processes.

    The forward takes the whole batch, has its chunks computed by the devices of `samestep run`, and returns all
    outputs, so the script's loss and everything after it stay as they are; the gradients of the parameters are summed
    on the tree. In one process (`python train.py`) the chunks run one after another, with the same bits.

    Args:
        module: the module to share out.
        device_ids: as torch's; their number is the number of chunks. All devices by default.
        output_device: as torch's.
        dim: along which tensors are cut and outputs are joined.
        num_microbatches: the number of chunks on any number of devices; `--logical-devices` overrides it.
        scatter: "tensors" cuts every tensor by `torch.chunk`, as torch does; "elements" cuts lists by element, for
            images of different sizes.

    Raises:
        UsageError: an argument that cannot be.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        num_microbatches: int | None = None,
        scatter: str = "tensors",
    ) -> None:
        nn.Module.__init__(self)
        check_choice("scatter", scatter, ("tensors", "elements"), option="")
        check_counts(num_microbatches=num_microbatches)
        self.module = module
        self.num_microbatches = num_microbatches
        self.scatter_mode = scatter
        _set_devices(active(), self, device_ids, output_device, dim)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the chunks; see `samestep.scripts.split_forward.forward.chunked_forward`."""
        changed = _overridden(self)
        if changed:
            raise UsageError(
                f"{type(self).__name__} overrides DataParallel.{changed[0]}, which samestep replaces as a whole; "
                "derive it from nn.DataParallel, move what it does into the module's forward, or pass lists with "
                "samestep.DataParallel(…, scatter='elements')"
            )
        return _forward(active(), self, inputs, kwargs, self.num_microbatches, self.scatter_mode)


class Replica:
    """The result of `torch.nn.parallel.replicate` in a single-process script: only an argument for `parallel_apply`."""

    _module: nn.Module
    _device: int

    def __init__(self, module: nn.Module, device: int) -> None:
        # By the dictionary: the class refuses assignments.
        self.__dict__.update(_module=module, _device=device)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"the script uses a replica of {type(self._module).__name__} itself, and its chunk may run elsewhere; "
            "needed: pass the result of torch.nn.parallel.replicate to torch.nn.parallel.parallel_apply as it is"
        )

    __call__ = __getattr__ = __setattr__ = _refuse


def patches(script: ScriptState) -> list[Patch]:
    """Patches of torch's DataParallel, in place: subclasses, earlier imports and pickles keep working."""

    def init(
        self: Any,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super(nn.DataParallel, self).__init__()
        self.module = module
        _set_devices(script, self, device_ids, output_device, dim)

    by_parts = nn.DataParallel.forward

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if _overridden(self):
            return by_parts(self, *inputs, **kwargs)
        return _forward(script, self, inputs, kwargs, None, "tensors")

    functional = partial(_data_parallel, script)
    return [
        Patch(nn.DataParallel, "__init__", init),
        Patch(nn.DataParallel, "forward", forward),
        Patch(torch_parallel, "data_parallel", functional, aliases=("torch.nn.parallel.data_parallel",)),
        *_parts(script),
    ]


def _parts(script: ScriptState) -> list[Patch]:
    """Patches of the functions of replicas; scattering and gathering are torch's own."""

    def replicate(network: nn.Module, devices: Sequence[int | torch.device], detach: bool = False) -> list[Replica]:
        if detach and torch.is_grad_enabled():
            raise UsageError("got replicate(…, detach=True); needed: call it inside torch.no_grad() instead")
        script.wraps_itself = True
        return [Replica(network, _index(device)) for device in devices]

    def parallel_apply(
        modules: Sequence[Any],
        inputs: Sequence[Any],
        kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
        devices: Sequence[Any] | None = None,
    ) -> list[Any]:
        # One module alone: the chunks of a call run on one copy of it, and their gradients are summed for it.
        owners = {id(module._module) if isinstance(module, Replica) else None for module in modules}
        if len(owners) != 1 or None in owners:
            raise UsageError("parallel_apply got modules that are no replicas; needed: the result of replicate")
        calls = [
            (tuple(entry) if isinstance(entry, list | tuple) else (entry,), keywords or {})
            for entry, keywords in zip(inputs, kwargs_tup or [{}] * len(modules), strict=True)
        ]
        return given_forward(script, modules[0]._module, calls, [module._device for module in modules])

    def refuse(self: nn.Module) -> NoReturn:
        raise UsageError("the script replicates a module by a function of its own; use torch.nn.parallel.replicate")

    within = "torch.nn.parallel.data_parallel"
    return [
        Patch(torch_parallel, "replicate", replicate, aliases=("torch.nn.parallel.replicate", within)),
        Patch(torch_parallel, "parallel_apply", parallel_apply, aliases=("torch.nn.parallel.parallel_apply", within)),
        Patch(nn.Module, "_replicate_for_data_parallel", refuse),
    ]


def _set_devices(
    script: ScriptState,
    wrapper: Any,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    dim: int,
) -> None:
    """Gives a wrapper the attributes that torch's own has."""
    count = num_visible(script)
    ids = list(range(count)) if device_ids is None else [_index(device) for device in device_ids]
    wrapper.device_ids = ids
    if not ids:
        return
    script.wraps_itself = True
    wrapper.dim = dim
    wrapper.output_device = ids[0] if output_device is None else _index(output_device)
    # torch's own forward, which runs for a derived class, checks that the module is on this device.
    kind = script.communicator.device.type
    wrapper.src_device_obj = torch.device("cuda", ids[0]) if kind == "cpu" else script.communicator.device


def _forward(
    script: ScriptState, wrapper: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], asked: int | None, scatter: str
) -> Any:
    """The forward of a wrapper, torch's or ours."""
    if not wrapper.device_ids:  # made where there was no device, as in torch
        return wrapper.module(*inputs, **kwargs)
    return chunked_forward(
        script,
        wrapper.module,
        inputs,
        kwargs,
        num_microbatches=script.num_microbatches or asked or len(wrapper.device_ids),
        dim=wrapper.dim,
        scatter=scatter,
        device_ids=wrapper.device_ids,
        output_device=wrapper.output_device,
    )


def _overridden(wrapper: nn.DataParallel[Any]) -> list[str]:
    """The parts of DataParallel that a subclass has of its own."""
    return [name for name in OVERRIDABLE if getattr(type(wrapper), name) is not getattr(nn.DataParallel, name)]


def _data_parallel(
    script: ScriptState,
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[int | torch.device] | None = None,
    output_device: int | torch.device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """torch's functional form."""
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    ids = list(range(num_visible(script))) if device_ids is None else [_index(device) for device in device_ids]
    if not ids:
        raise UsageError("got device_ids=[] (or there is no device); give one id a chunk, or None for all devices")
    script.wraps_itself = True
    return chunked_forward(
        script,
        module,
        args,
        module_kwargs or {},
        num_microbatches=script.num_microbatches or len(ids),
        dim=dim,
        device_ids=ids,
        output_device=ids[0] if output_device is None else _index(output_device),
    )


def _index(device: int | str | torch.device) -> int:
    """A device's number; -1 for the host, as in torch."""
    if isinstance(device, int):
        return device
    chosen = torch.device(device)
    return -1 if chosen.type == "cpu" else chosen.index or 0
