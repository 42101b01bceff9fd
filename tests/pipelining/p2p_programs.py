"""Programs for ranks that hand tensors on."""

import pickle
from datetime import timedelta
from pathlib import Path

import torch

from samestep.comm.mesh_groups import connect_axes
from samestep.core.mesh import Mesh
from samestep.engine.pipelining.p2p import HEAD_BYTES, connect_stages
from samestep.errors import PeerLostError

TIMEOUT = timedelta(seconds=60)


def tensors(device):
    """Of many dtypes, strides and places in memory, some of which need a gradient."""
    base = torch.arange(240, dtype=torch.float32).view(4, 6, 10)
    made = [
        base,
        base.transpose(0, 2),
        base[1:, 2:5, 3],
        torch.ones(1).expand(7, 5),
        base[:0],
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last),
        base.bfloat16()[2].t(),
        torch.arange(9) > 4,
        torch.view_as_complex(torch.randn(3, 2, generator=torch.Generator().manual_seed(2))).conj(),
        base.clone().requires_grad_(),
    ]
    return [*(tensor.to(device) for tensor in made), None]


def form(tensor):
    if tensor is None:
        return None
    place = tensor.data_ptr() % 64 if tensor.numel() else 0
    values = tensor.detach().resolve_conj().tolist()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), place, values, tensor.requires_grad


def hand_round(communicator):
    """Each rank sends to the next, more than once before it receives; what left and what came."""
    p2p = connect_stages(communicator, Mesh({"pipe": communicator.world_size}), TIMEOUT)
    following, before = (p2p.rank + 1) % p2p.world_size, (p2p.rank - 1) % p2p.world_size
    for number in range(3):
        p2p.send(following, tensors(communicator.device), f"note {number} of {p2p.rank}")
    came = [p2p.receive(before) for _ in range(3)]
    p2p.wait()
    return [form(tensor) for tensor in tensors(communicator.device)], [
        ([form(t) for t in got], note) for got, note in came
    ]


def fail(communicator):
    """One rank fails while the others wait for it; what these are told."""
    p2p = connect_stages(communicator, Mesh({"pipe": communicator.world_size}), TIMEOUT)
    if p2p.rank == 0:
        p2p.fail("the first is out of order")
        communicator.barrier()
        return ""
    try:
        p2p.receive(0)
    except PeerLostError as error:
        communicator.barrier()
        return str(error)
    return "nothing"


class Runs:
    """Its pickle makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def send_pickle(communicator, path):
    """The first rank sends a pickle in place of a message's head; the error of the other one."""
    p2p = connect_stages(communicator, Mesh({"pipe": communicator.world_size}), TIMEOUT)
    if p2p.rank == 0:
        raw = pickle.dumps(Runs(path)).ljust(HEAD_BYTES, b"\0")
        p2p._post(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 1, None)[0].wait()
        communicator.barrier()
        return ""
    try:
        p2p.receive(0)
    except ValueError as error:
        communicator.barrier()
        return type(error).__name__
    return "nothing"


def sums_along(communicator, sizes):
    """What the ranks along each axis say together."""
    communicators = connect_axes(communicator, Mesh(sizes), TIMEOUT)
    own = torch.tensor([communicator.rank], device=communicator.device) if communicators["data"].rank == 1 else None
    shared = communicators["data"].share(own, 1)
    words = {axis: [row[0] for row in along.gather_words([communicator.rank])] for axis, along in communicators.items()}
    return words, shared.item()
