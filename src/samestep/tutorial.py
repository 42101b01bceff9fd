"""The functions of tutorials that write data parallelism out by hand, on lists of parameters.

    devices = [torch.device("cuda", i) for i in range(4)]
    replicas = replicate_params(params, devices)
    for x, y in batches:
        parts = split_and_load((x, y), devices)
        for (x_part, y_part), replica in zip(parts, replicas):
            loss(net(x_part, replica), y_part).sum().backward()
        allreduce([[p.grad for p in replica] for replica in replicas])
        for replica in replicas:
            sgd(replica, lr=0.1, batch_size=len(x))

Each entry of `devices` is a logical device; there are V of them on any number of processes. A script that runs once
holds all of them. Of ranks (torchrun, `samestep run --multi-process`) each holds the logical devices of its contiguous
range, so the lists are as long as that range; a process beyond V holds one ghost, whose microbatch has no rows and
whose gradients do not count. Loop over the returned lists, not over `devices`.

Random numbers that are drawn for a microbatch (dropout) come from the process's own stream, so they depend on the
number of processes; a notice is printed. `samestep.DataParallel` seeds each microbatch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.checks import check_type
from samestep.comm.transport import LocalTransport
from samestep.core.microbatches import microbatch_bounds
from samestep.data.batch import place_aligned
from samestep.data.checksums import checksum
from samestep.data.nested import leaves, map_tensors, num_samples, take_rows
from samestep.errors import DataError, DeterminismError, DeviceError, UsageError
from samestep.scripts.backward import generator_state
from samestep.scripts.script_state import ScriptState, active, num_visible
from samestep.scripts.split_forward import pieces
from samestep.scripts.split_forward.chunks import deal
from samestep.text import counted

DeviceLike = torch.device | str | int
HOST = -1


@dataclass(frozen=True)
class DeviceLayout:
    """The logical devices of a call, and the ranks that hold them."""

    ranges: tuple[range, ...]  # the logical devices of each rank; empty for ranks beyond V
    # the accelerator that the script named for each logical device, as it counts them; -1 for the host
    indices: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        """V, the number of logical devices."""
        return len(self.indices)

    def held_by(self, rank: int) -> range:
        """The logical devices of a rank; for a ghost the number V, which is none."""
        return self.ranges[rank] or range(self.num_microbatches, self.num_microbatches + 1)

    def index_of(self, logical: int) -> int:
        """The accelerator of a logical device or of a ghost."""
        return self.indices[min(logical, self.num_microbatches - 1)]


@dataclass
class TutorialState:
    """State between two calls."""

    layout: DeviceLayout  # from the last `replicate_params` or `split_and_load`
    # the state of the random generators after a `split_and_load`, until it has been looked at
    generators: int | None = None


def replicate_params(
    params: Any, devices: Sequence[DeviceLike] | int, *, script: ScriptState | None = None
) -> list[Any]:
    """Copies parameters to every logical device that this process holds.

    Args:
        params: tensors or `nn.Parameter`s in a list, or in nested lists, tuples and dicts.
        devices: one entry a logical device, or how many there are. `--logical-devices` overrides their number.
        script: of this process; the running script's if None.

    Returns:
        A copy of `params`, of the same nesting, for each local logical device: leaf tensors in memory of their own,
        with equal bits; floating ones require gradients.

    Raises:
        UsageError: there is no tensor in `params`, or one twice; or no device in `devices`.
        DeviceError: an entry of `devices` is no device, or an accelerator where there is none.
        DeterminismError: the ranks hold different parameters.
    """
    script = _found(script, "replicate_params")
    layout = _layout(devices, script)
    fits = not isinstance(params, nn.Module) or isinstance(params, nn.ParameterList | nn.ParameterDict)
    check_type("params", params, fits, "list(model.parameters())")
    source = params
    if isinstance(params, nn.ParameterDict):
        source = dict(params.items())
    elif not isinstance(params, Tensor | Mapping | tuple | list):  # such as the generator model.parameters()
        source = list(params)
    tensors = [leaf for leaf in leaves(source) if isinstance(leaf, Tensor)]
    check_type("params", params, tensors, "a list of tensors")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise UsageError("params holds one tensor twice: list it once, and use it twice in the forward")
    state = f"{counted(layout.num_microbatches, 'device')}, {counted(len(tensors), 'tensor')}"
    _compare("replicate_params", "the ranks hold different parameters", state, source, script)
    script.tutorial = TutorialState(layout)
    if script.devices():
        script.notice(
            f"this process computes all {layout.num_microbatches} devices of samestep.tutorial, one after another: the "
            "script runs once. As ranks (torchrun, samestep run --multi-process) each process has a part of them"
        )
    with torch.no_grad():
        copies = [_place(source, layout.index_of(logical), script) for logical in layout.held_by(script.rank)]
    for tensor in leaves(copies):
        if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
    return copies


def split_and_load(
    batch: Any, devices: Sequence[DeviceLike] | int, even_split: bool = True, *, script: ScriptState | None = None
) -> list[Any]:
    """Cuts a global batch into V microbatches, and copies this process's microbatches to their devices.

    Args:
        batch: a tensor, or tensors in nested tuples, lists and dicts, with the samples along dim 0; the whole global
            batch, the same on every rank.
        devices: as for `replicate_params`.
        even_split: refuse a batch that V does not divide; else the first microbatches hold one sample more, and the
            last ones may be empty.
        script: of this process; the running script's if None.

    Returns:
        For each local logical device its microbatch, of the same nesting as `batch`, always a copy.

    Raises:
        UsageError: V does not divide the batch and `even_split` is True; or the batch requires gradients or holds
            NumPy arrays.
        DataError: there is no tensor in it, or the tensors disagree on the number of samples.
        DeviceError: as for `replicate_params`.
        DeterminismError: the ranks got different batches.
    """
    script = _found(script, "split_and_load")
    layout = _layout(devices, script)
    length = _check_batch(batch)
    if even_split and length % layout.num_microbatches:
        raise UsageError(
            f"got {counted(length, 'sample')} for {counted(layout.num_microbatches, 'device')}, which do not divide "
            "evenly; use split_and_load(batch, devices, even_split=False), or batches of a multiple of that size"
        )
    state = f"{counted(layout.num_microbatches, 'device')}, {counted(length, 'sample')}"
    _compare("split_and_load", "the ranks got different batches", state, batch, script)
    script.tutorial = TutorialState(layout, generator_state(script.generators.of_torch))
    bounds = [*microbatch_bounds(length, layout.num_microbatches), length]

    def part(logical: int) -> Any:
        rows = take_rows(batch, bounds[logical], bounds[logical + 1], length)
        return _place(rows, layout.index_of(logical), script)

    with torch._C.DisableTorchFunction():
        return [part(logical) for logical in layout.held_by(script.rank)]


def allreduce(tensors: Sequence[Any], *, script: ScriptState | None = None) -> None:
    """Makes every tensor the sum over all logical devices, in place; tier `bitwise`.

    Args:
        tensors: one tensor a local logical device (`[replica[i].grad for replica in replicas]`), or one list of
            tensors each (`[[p.grad for p in replica] for replica in replicas]`), which travel together and so faster.
            Before the first `replicate_params` or `split_and_load` nothing is divided: every process holds the whole
            list, and sums it.
        script: of this process; the running script's if None.

    Raises:
        UsageError: not one entry a local logical device, entries that do not match, None or a sparse tensor among
            them.
        DeterminismError: the ranks reduce tensors of other shapes or dtypes.
    """
    script = _found(script, "allreduce")
    rows = _rows(tensors)
    state: TutorialState | None = script.tutorial
    communicator = script.communicator
    if state is None:
        _compare("allreduce", "the ranks hold different tensors", f"a list of {len(rows)}", rows, script)
        alone = LocalTransport()
        communicator = replace(communicator, transport=alone, control=alone)
        layout = DeviceLayout((range(len(rows)),), (HOST,) * len(rows))
    else:
        layout = state.layout
        if state.generators is not None and state.generators != generator_state(script.generators.of_torch):
            script.notice(
                "random numbers were drawn between split_and_load and allreduce (by dropout, for one): they depend on "
                "the number of processes, and so will the result; samestep.DataParallel seeds each microbatch alike"
            )
        state.generators = None
    held = layout.held_by(communicator.rank)
    if len(rows) != len(held):
        raise UsageError(
            f"got {counted(len(rows), 'tensor')} (or lists of them) to reduce over {layout.num_microbatches} logical "
            f"devices on {counted(communicator.world_size, 'rank')}; this rank holds {len(held)} of them: give one "
            "entry for each replica that replicate_params returned"
        )
    forms = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in rows[0])
    forms = f"{layout.num_microbatches} devices, {forms}"
    _compare("allreduce", "the ranks reduce different tensors", forms, None, script)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        likes = [tensor.to(communicator.device) for tensor in rows[0]]
        columns = [[row[index] for row in rows] for index in range(len(likes))]  # a ghost's are not read
        totals = pieces.sum_pieces(communicator, layout.ranges, likes, columns)
        for row in rows:
            torch._foreach_copy_(row, totals)


def _found(script: ScriptState | None, verb: str) -> ScriptState:
    """The script of a call, which must be at a point that all ranks pass."""
    script = script or active()
    if script.world_size > 1 and not script.may_meet():
        raise UsageError(
            f"{verb} was called inside a wrapped forward, in another thread or in a child process, where the ranks "
            "cannot meet; call it from the script's main thread, outside the forward"
        )
    return script


def _layout(devices: Sequence[DeviceLike] | int, script: ScriptState) -> DeviceLayout:
    """The assignment of logical devices to ranks."""
    if isinstance(devices, int) and not isinstance(devices, bool):
        named = [index % max(num_visible(script), 1) for index in range(devices)]
    elif isinstance(devices, Iterable) and not isinstance(devices, str):
        named = [_index_of(entry) for entry in devices]
    else:
        raise UsageError(f"got devices={devices!r}; give a list of devices, such as [0, 1], or their number")
    if not named:
        raise UsageError(f"got devices={devices!r}; at least one device is needed")
    num_microbatches = script.num_microbatches or len(named)
    indices = tuple(named[microbatch * len(named) // num_microbatches] for microbatch in range(num_microbatches))
    return DeviceLayout(deal(num_microbatches, script.world_size), indices)


def _index_of(entry: Any) -> int:
    """The accelerator that an entry of `devices` names; -1 for the host."""
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
        return entry
    try:
        device = torch.device(entry)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"got {entry!r} among devices; write such as cuda:0, cpu or 0") from error
    if device.type == "cpu":
        return HOST
    if not torch.accelerator.is_available():
        raise DeviceError(
            f"asked for {device}, torch {torch.__version__} sees no accelerator; give a number of devices, or cpu for "
            "each, or start by samestep run --devices cpu:N, where CPU workers play accelerators"
        )
    return device.index or 0


def _place(value: Any, index: int, script: ScriptState) -> Any:
    """A copy of all tensors of a value on this rank's device, which plays the accelerator of that index."""
    device = torch.device("cpu") if index == HOST else script.communicator.device
    with torch._C.DisableTorchFunction():  # simulated devices are not involved
        placed = place_aligned(map_tensors(torch.clone, value), device)
        return map_tensors(lambda tensor: script.mark(tensor, index), placed)


def _check_batch(batch: Any) -> int:
    """The number of samples of a batch that can be split."""
    found = leaves(batch)
    if any(isinstance(leaf, np.ndarray) for leaf in found):
        raise UsageError("the batch holds a NumPy array, which cannot move to a device; give torch.as_tensor(array)")
    if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in found):
        raise UsageError("the batch requires gradients; give batch.detach(), or use samestep.DataParallel")
    length = num_samples(batch)
    if length < 1:
        raise DataError("the batch holds no samples; leave empty batches out")
    return length


def _rows(tensors: Any) -> list[list[Tensor]]:
    """The tensors of each local logical device, checked against the first device's."""
    fits = isinstance(tensors, Iterable) and not isinstance(tensors, Tensor)
    check_type("tensors of allreduce", tensors, fits, "a list, one entry a device")
    rows = [leaves(entry) if isinstance(entry, list | tuple | Mapping) else [entry] for entry in tensors]
    if not rows or not rows[0]:
        raise UsageError("got an empty list; give the tensors to reduce, one entry a device")
    for device, row in enumerate(rows):
        for number, tensor in enumerate(row):
            place = f"tensor {number} of local device {device}"
            if tensor is None:
                raise UsageError(
                    f"{place} is None: a parameter that the loss does not depend on has no gradient, and without a "
                    "backward none has; leave such parameters out on all devices, or give zeros"
                )
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                got = f"{tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise UsageError(f"{place} is {got}; allreduce sums dense tensors in place: give its .to_dense()")
        if [(t.dtype, t.shape) for t in row] != [(t.dtype, t.shape) for t in rows[0]]:
            shapes = [[list(tensor.shape) for tensor in row] for row in (rows[0], row)]
            raise UsageError(
                f"the tensors of local device {device} ({shapes[1]}) do not match device 0 ({shapes[0]}) in "
                "number, shape or dtype; give the same parameters' gradients for each device"
            )
    return rows


def _compare(verb: str, why: str, state: str, value: Any, script: ScriptState) -> None:
    """Raises if the ranks call a function on different values; None compares the state alone."""
    if script.world_size == 1:
        return
    with torch._C.DisableTorchFunction():
        own = state if value is None else f"{state}, checksum {checksum(value):016x}"
        texts = script.communicator.gather_values(f"{verb}: {own}")
    if len(set(texts)) > 1:
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise DeterminismError(f"{why}:\n{lines}\nEvery rank must make the same calls with the same values")
