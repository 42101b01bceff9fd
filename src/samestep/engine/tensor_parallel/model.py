"""A model of which every rank has a part of each matrix: what this rank has of it, and how it lies in the whole."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.optim import Optimizer

from samestep.comm.buckets import aligned_zeros
from samestep.comm.group import GroupTransport
from samestep.comm.membership import Membership
from samestep.comm.mesh import line_mesh
from samestep.comm.pieces import Spread
from samestep.data.batch import memory_border
from samestep.engine.leaving import make_writable
from samestep.engine.parameters import named_parameters
from samestep.engine.spread import MIXED, SpreadState, check_contiguous, check_elementwise
from samestep.engine.strategies import TensorParallel
from samestep.engine.tensor_parallel.chains import call_as_a_whole
from samestep.engine.tensor_parallel.plan import DROPOUT, HEADS, PACKED, REGION, Division, describe_plan, read_plan
from samestep.engine.tensor_parallel.styles import make_style
from samestep.engine.tensor_parallel.waiting import tell_waiting
from samestep.errors import PeerLostError, UsageError

LOST = ("gloo/transport", "Connection closed by peer", "NCCL")  # torch's words for a transfer that failed


class DividedModel:
    """Divides a model, in place, and gives the optimizers what this rank has of it.

    Args:
        membership: the ranks; those along "tensor" have a part of each matrix.
        model: equal on all ranks; the parameters of modules in the plan become DTensors.
        optimizers: over its parameters, which become this rank's parts.
        options: how.

    Attributes:
        communicator: among the ranks along "tensor".
        contract: what decides the bits: how many these are, and a hash of what is divided and how.
        model: the same, divided.
        leaves: what autograd gives gradients to, by name: DTensors, or parameters that every rank has.
        state: this rank's parts; parameters that every rank has are whole.

    Raises:
        UsageError: it cannot be divided so, or the optimizer's state cannot be spread.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: TensorParallel
    ) -> None:
        check_elementwise(optimizers, membership.communicator.device, by_rows=False)
        named_parameters(model, optimizers)
        self.model = model
        self.communicator = membership.along("tensor")
        size = self.communicator.world_size
        divisions = read_plan(model, options, size)
        self.contract = {"ranks": size, "plan": describe_plan(divisions)}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            check_contiguous(name, parameter, "keep the whole model on each device (strategy='replicate')")
        _refuse_hooks(model, divisions)
        assert membership.mesh is not None, "a rank that is alone has everything"
        mesh = line_mesh(membership.communicator, membership.mesh, "tensor", membership.timeout)
        _divide(model, divisions, mesh)
        if options.plan is None and not callable(getattr(model, "tensor_plan", None)):
            call_as_a_whole(model, divisions)
        for name in divisions:
            tell_waiting(model.get_submodule(name), membership.heartbeat)
        self.leaves: dict[str, nn.Parameter] = dict(model.named_parameters())
        parts, spreads = {}, {}
        packed = _packed(model, divisions)
        for name, leaf in self.leaves.items():
            if not isinstance(leaf, DTensor):
                parts[name] = leaf
                continue
            spread = _spread_of(name, leaf, packed.get(name, 1), size)
            parts[name] = _part(leaf)
            if spread is not None:
                spreads[name] = spread
        self.state = SpreadState(parts, spreads, has_whole_parameters=False, communicator=self.communicator)
        self.state.hand_over(optimizers, names, self.communicator.rank)
        self._trainable = {name: leaf.requires_grad for name, leaf in self.leaves.items()}

    def note_frozen(self) -> None:
        """Freezes or unfreezes parts as the parameters of the model were since the last call."""
        for name, leaf in self.leaves.items():
            if leaf.requires_grad != self._trainable[name]:
                self.state.parts[name].requires_grad_(leaf.requires_grad)
        self._trainable = {name: leaf.requires_grad for name, leaf in self.leaves.items()}

    def explain(self, error: RuntimeError) -> Exception | None:
        """What an error means that the ranks met while they computed together; None if it is none of theirs."""
        text = str(error)
        if MIXED in text:
            return UsageError(
                "a parameter that is divided was used while its module was not called, or together with one that is "
                'not: name both in the plan (norms as "sequence"), or none of the two'
            )
        if isinstance(error, dist.DistError) or any(word in text for word in LOST):
            transport = self.communicator.transport
            if isinstance(transport, GroupTransport):
                return transport.peers_lost(error)
            return PeerLostError(f"a rank that has a part of the same model was lost, or has failed: {error}")
        return None


def _divide(model: nn.Module, divisions: Mapping[str, Division], mesh: DeviceMesh) -> None:
    """Divides the modules; each one's rank and place in the model stay as they are, and what is frozen is frozen."""
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, division in divisions.items():
        module = model.get_submodule(name)
        parallelize_module(module, mesh, make_style(division, module), src_data_rank=None)
        if division.style not in (HEADS, DROPOUT, REGION):  # what these give may be written to
            module.register_forward_hook(make_writable)
    for name, parameter in model.named_parameters(remove_duplicate=False):  # styles of torch's own may unfreeze
        parameter.requires_grad_(is_trained.get(name, parameter.requires_grad))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # its short cut for padded inputs reads whole weights
            module.use_nested_tensor = False


def _refuse_hooks(model: nn.Module, divisions: Mapping[str, Division]) -> None:
    """Raises a `UsageError` that names the first divided parameter with a hook, which would be left behind."""
    for path in divisions:
        for name, parameter in model.get_submodule(path).named_parameters(path):
            if divisions[path].style != REGION and (parameter._backward_hooks or _post_hooks(parameter)):
                raise UsageError(
                    f"parameter {name} has a hook (register_hook), which would not come along where it is divided: "
                    "register hooks after train_step, where they see DTensors, clip by max_grad_norm, or leave its "
                    "module out of the plan"
                )


def _post_hooks(parameter: nn.Parameter) -> object:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _packed(model: nn.Module, divisions: Mapping[str, Division]) -> dict[str, int]:
    """How many matrices lie in each parameter in which there are several, by name."""
    packed: dict[str, int] = {}
    for path, division in divisions.items():
        prefix = f"{path}." if path else ""
        if division.style == PACKED:
            packed |= {f"{prefix}{name}": division.number for name in model.get_submodule(path)._parameters}
        if division.style == HEADS:
            packed |= {f"{prefix}in_proj_weight": 3, f"{prefix}in_proj_bias": 3}
    return packed


def _spread_of(name: str, leaf: DTensor, count: int, size: int) -> Spread | None:
    """How a parameter lies on the ranks; None if every rank has all of it.

    Raises:
        UsageError: a style of torch's own lets it lie in a way that is not followed here.
    """
    (placement,) = leaf.placements
    if placement == Replicate():
        return None
    if type(placement) is not Shard or leaf.shape[placement.dim] % (count * size):
        raise UsageError(
            f"parameter {name} of shape {list(leaf.shape)} lies on {size} ranks as {placement}; needed: equal slices "
            "of one dimension (Shard), or all of it on each rank (Replicate)"
        )
    blocks = count * leaf.shape[: placement.dim].numel()
    part = leaf.numel() // blocks // size
    return Spread(leaf.shape, tuple(part * rank for rank in range(size + 1)), blocks)


def _part(leaf: DTensor) -> nn.Parameter:
    """This rank's part of a DTensor, in the same memory: its own, and on a border."""
    local = leaf._local_tensor
    is_own = local.untyped_storage().nbytes() == local.numel() * local.element_size() and local.is_contiguous()
    if not is_own or local.data_ptr() % memory_border(local.device):
        home = aligned_zeros(local.numel(), local.dtype, local.device)[: local.numel()].view(local.shape)
        local.data = home.copy_(local.detach())
    part = nn.Parameter(cast(DTensor, leaf.detach()).to_local(), requires_grad=leaf.requires_grad)
    assert part.data_ptr() == local.data_ptr(), "the optimizer updates what the model reads"
    return part
