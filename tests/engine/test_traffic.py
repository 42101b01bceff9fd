"""The memory traffic of a step beside that of the model and the optimizer, in units G of one gradient."""

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import DEVICE

from samestep.run.run import Run

LAYERS, WIDTH, NUM = 8, 512, 8
MOST = 36.1  # copies 8, sums along the tree 21, one check for two microbatches 4, division and norm 3
MAKES_ONLY = ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like", "record_stream")
WRITES_ONLY = ("zero_", "fill_", "copy_", "_foreach_copy_", "_foreach_zero_")


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write: each operand once; views and allocations are free."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        name, schema = func._overloadpacket.__name__, func._schema
        if name in MAKES_ONLY or func.is_view:
            return results
        for k, argument in enumerate(schema.arguments):
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not (writes and (name in WRITES_ONLY or argument.is_out))
            self._add(value, reads + writes)
        if not any(result.alias_info for result in schema.returns):
            self._add(results, 1)
        return results

    def _add(self, values, times):
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                size = 1
                for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
                    size *= length if stride else 1
                self.bytes += times * size * tensor.element_size()


def traffic_of(action):
    """The bytes that some calls read and write."""
    with Traffic() as traffic:
        action()
    return traffic.bytes


def loss_fn(model, x):
    return model(x).square().mean()


def test_a_step_of_eight_microbatches_moves_few_gradients_beside_those_of_backward_and_optimizer():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    gradient = sum(parameter.nbytes for parameter in model.parameters())
    samples = torch.randn(NUM, WIDTH)
    run = Run(NUM, NUM, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = run.train_step(model, optimizer, loss_fn)
    samples = samples.to(step.communicator.device)
    for _ in range(4):  # the first ones compare the model after each microbatch
        step(samples)

    def microbatch():
        optimizer.zero_grad()
        loss_fn(model, samples[:1]).backward()

    model_traffic = NUM * traffic_of(microbatch) + traffic_of(optimizer.step)
    beside = (traffic_of(lambda: step(samples)) - model_traffic) / gradient
    assert beside < MOST, beside
