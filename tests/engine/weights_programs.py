"""Programs that give whole weights to models of which each rank has a part, and take them."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from samestep.checkpoint.digest import state_digest
from samestep.doctor.proof_programs import StagedGpt
from samestep.errors import UsageError
from samestep.run.run import Run

MESHES = {"replicate": None, "sharded": None, "tensor": "tensor", "pipeline": "pipe"}
LENGTH = 8
QUERIES = "blocks.0.queries_keys_values.weight"
PLAN = {"blocks.*.feed_in": ColwiseParallel(), "blocks.*.feed_out": RowwiseParallel()}


def texts(count=16):
    return torch.randint(0, 24, (count, LENGTH), generator=torch.Generator().manual_seed(6))


def loss(model, batch):
    scores = model(batch)
    return nn.functional.cross_entropy(scores.flatten(0, -2), batch.roll(-1, 1).flatten())


def weights(seed=9):
    """Whole weights, under the names that the model gives them."""
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in make_model().state_dict().items()}


def make_model():
    return StagedGpt(layers=2, width=16, heads=4, context=LENGTH, dropout=0.0, tied=False)


def make_step(communicator, strategy):
    size = communicator.world_size
    axis = MESHES[strategy]
    run = Run(8, 4, 5, communicator=communicator, mesh=None if axis is None or size == 1 else {axis: size})
    model = make_model()
    if strategy == "tensor":
        parallelize_module(model, run.mesh["tensor"], PLAN)
        strategy = "replicate"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return run.train_step(model, optimizer, loss, strategy=strategy), run.loader(texts(), shuffle=True)


def step_over(step, loader):
    for batch in loader:
        step(batch)


def loaded(communicator, strategy, when, part="", spoil=""):
    """Loads whole weights before or between steps; digests before and after, and after two more steps."""
    step, loader = make_step(communicator, strategy)
    if when == "between":
        step_over(step, loader)
    before = state_digest(step)
    given = weights()
    if spoil:
        given[spoil][-1] += 1
    inside = {name.removeprefix(f"{part}."): t for name, t in given.items() if name.startswith(part)}
    step.model.get_submodule(part).load_state_dict(inside)
    after = state_digest(step)
    step_over(step, loader)
    return before, after, state_digest(step)


def taken(communicator, strategy):
    """What `state_dict` gives after training, whole; and digests of the model: trained, emptied, given it again."""
    step, loader = make_step(communicator, strategy)
    step_over(step, loader)
    state = {name: tensor.detach().clone() for name, tensor in step.model.state_dict().items()}
    digests = [state_digest(step)]
    with torch.no_grad():
        for parameter in step.sharded_state.parts.values() if step.sharded_state else step.model.parameters():
            parameter.zero_()
    digests.append(state_digest(step))
    step.model.load_state_dict(state)
    digests.append(state_digest(step))
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {name: tensor.numpy(force=True) for name, tensor in whole.items()}, digests


def refused(communicator, strategy):
    """What is said of weights of another shape, and of another name."""
    step, _ = make_step(communicator, strategy)
    said = []
    for wrong in ({QUERIES: torch.zeros(12, 16)}, {"another": torch.zeros(2)}):
        with pytest.raises(RuntimeError) as caught:
            step.model.load_state_dict(weights() | wrong)
        said.append(str(caught.value))
    return said


def assigned(communicator, strategy):
    """What is said of weights that would take the parameters' place."""
    step, loader = make_step(communicator, strategy)

    def go_on():
        step.model.load_state_dict(weights(), assign=True)
        step_over(step, loader)

    with pytest.raises(UsageError) as caught:
        go_on()
    return str(caught.value)


def kept(communicator, strategy):
    """This rank's parameters before a step, after it, and when the model was given copies of those from before."""
    step, loader = make_step(communicator, strategy)
    step_over(step, loader)

    def parameters():
        held = step.sharded_state.parts.values() if step.sharded_state else step.model.parameters()
        return [parameter.numpy(force=True).tobytes() for parameter in held]

    copies = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    seen = [parameters()]
    step_over(step, loader)
    seen.append(parameters())
    step.model.load_state_dict(copies)
    return [*seen, parameters()]
