"""Hand-written training loops, which tests run on every rank of a world."""

import torch

from samestep.core.tree import Block, TreeSum
from samestep.errors import SamestepError
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.chunks import deal
from samestep.tutorial import allreduce, replicate_params, split_and_load

FEATURES, CLASSES = 6, 3


def data(sizes, device):
    """Batches of the given sizes."""
    generator = torch.Generator().manual_seed(4)
    pairs = [
        (torch.randn(n, FEATURES, generator=generator), torch.randint(CLASSES, (n,), generator=generator))
        for n in sizes
    ]
    return [{"x": x.to(device), "y": y.to(device)} for x, y in pairs]


def parameters(device):
    """A small network as a list of parameters, with one above the size of a small message."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(FEATURES, 2500), (2500,), (2500, CLASSES), (CLASSES,)]
    return [torch.randn(*shape, generator=generator).to(device) * 0.1 for shape in shapes]


def loss_of(params, batch):
    """The sum of the losses of a microbatch, by hand."""
    hidden = torch.tanh(batch["x"] @ params[0] + params[1])
    return torch.nn.functional.cross_entropy(hidden @ params[2] + params[3], batch["y"], reduction="sum")


def bits(tensors):
    """Bytes of tensors."""
    return [tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def train(communicator, devices, sizes, together=True, even_split=False, breaker=None):
    """A few steps of hand-written SGD: the losses, the parameters' bits, and the rows that this rank had."""
    script, device = ScriptState(communicator), communicator.device
    replicas = replicate_params(parameters(device), devices, script=script)
    losses, rows = [], []
    for batch in data(sizes, device):
        parts = split_and_load(batch, devices, even_split, script=script)
        rows.append([len(part["x"]) for part in parts])
        totals = []
        for replica, part in zip(replicas, parts, strict=True):
            total = loss_of(replica, part)
            total.backward()
            totals.append(total.detach())
        gradients = [[p.grad for p in replica] for replica in replicas]
        if breaker is not None:
            BREAKERS[breaker](gradients, script)
        elif together:
            allreduce(gradients, script=script)
        else:
            for column in zip(*gradients, strict=True):
                allreduce(column, script=script)
        allreduce(totals, script=script)
        losses.append(totals[0].item().hex())
        assert all(bits([total]) == bits(totals[:1]) for total in totals)
        with torch.no_grad():
            for replica in replicas:
                for p in replica:
                    p -= 0.5 * p.grad / len(batch["x"])
                    p.grad = None
    assert all(bits(replica) == bits(replicas[0]) for replica in replicas)
    return {"losses": losses, "bits": bits(replicas[0]), "rows": rows}


def left_fold(gradients, script):
    """Adds this rank's gradients one after another before they are reduced: a sum of another order."""
    for column in zip(*gradients, strict=True):
        total = column[0].clone()
        for other in column[1:]:
            total += other
        parts = script.communicator.transport.gather(total.view(-1)).wait()
        total = sum(reversed(parts.chunk(script.communicator.world_size))).view(total.shape)
        for gradient in column:
            gradient.copy_(total)


def local_mean(gradients, script):
    """Leaves the other ranks out."""
    for column in zip(*gradients, strict=True):
        total = torch.stack(list(column)).mean(0) * 4
        for gradient in column:
            gradient.copy_(total)


BREAKERS = {"left fold": left_fold, "local mean": local_mean}


def sum_values(communicator, num_devices, dtype_name, shape):
    """The sum of tensors that the rank makes for each of its logical devices; and the tree sum of all."""
    dtype = getattr(torch, dtype_name)
    script = ScriptState(communicator)
    replicate_params([torch.zeros(1)], num_devices, script=script)
    generator = torch.Generator().manual_seed(6)
    numbers = [torch.randn(shape, generator=generator) * 100 for _ in range(num_devices)]
    everyone = [value.to(communicator.device, dtype) for value in numbers]
    mine = deal(num_devices, communicator.world_size)[communicator.rank]
    ghost = torch.full(shape, 7, dtype=dtype, device=communicator.device)
    ours = [everyone[k].clone() for k in mine] or [ghost]
    allreduce(ours, script=script)
    counter = TreeSum(torch.add)
    for k, value in enumerate(everyone):
        counter.push(Block(k, 1), value)
    return [bits([value]) == bits([counter.root()]) for value in ours]


def reduce_what_everyone_holds(communicator):
    """A list of three that the script made itself, before anything was divided."""
    values = [torch.full((2,), float(10**k)) for k in range(3)]
    allreduce(values, script=ScriptState(communicator))
    return [value.tolist() for value in values]


def error_of(communicator, case):
    """The error that a rank gets; cases are named by their mistake."""
    script = ScriptState(communicator)
    rank = communicator.rank
    try:
        if case == "parameters":
            replicate_params([torch.full((3,), float(rank))], 4, script=script)
        elif case == "batches":
            split_and_load(torch.full((4, 2), float(rank)), 4, script=script)
        elif case == "lengths":
            split_and_load(torch.zeros(4 + 4 * rank, 2), 4, script=script)
        elif case == "tensors":
            replicate_params([torch.zeros(1)], 4, script=script)
            allreduce([torch.zeros(2 + rank)] * 2, script=script)
        elif case == "undivided":
            allreduce([torch.full((3,), float(rank))] * 2, script=script)
        elif case == "chunk":
            with script.chunk(0):
                replicate_params([torch.zeros(1)], 4, script=script)
    except SamestepError as error:
        return type(error).__name__, str(error)
    return None
