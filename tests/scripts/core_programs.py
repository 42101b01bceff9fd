"""Small wrapped forwards, which tests run with the processes of a world; and ways to break what these exchange."""

import contextlib
import functools
import gc
import weakref
from collections import namedtuple
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from driving import driving
from torch import nn
from worlds import device_of

from samestep.comm import buckets
from samestep.comm.buckets import FlatSum
from samestep.comm.transport import LocalTransport
from samestep.core.tree import Block
from samestep.engine.forward_backward import backward_on_this_thread
from samestep.errors import SamestepError
from samestep.patch import Patch, applied
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward import calls, derivatives, pieces, shared_forward
from samestep.scripts.split_forward.calls import make_sums
from samestep.scripts.split_forward.forward import chunked_forward
from samestep.scripts.workers import serve
from samestep.scripts.workers.link import decode

WIDTH = 5
MARK = 50.0


class Nested(nn.Module):
    """Uses a weight twice and another in some chunks; in its backward a hook runs one more, through the same graph."""

    def __init__(self, values):
        super().__init__()
        self.weight, self.sometimes = nn.Parameter(values(WIDTH, WIDTH)), nn.Parameter(values(WIDTH))

    def forward(self, x):
        hidden = x @ self.weight
        result = hidden.square() @ self.weight
        if x[0, 0] > 0:
            result = result + self.sometimes

        def on_gradient(gradient):
            (slope,) = torch.autograd.grad(hidden, x, torch.ones_like(hidden), retain_graph=True)
            return gradient + slope

        result.register_hook(on_gradient)
        return result


class Pair(NamedTuple):
    left: Any
    right: Any


class Cubic(nn.Module):
    """A polynomial of degree three in everything; one parameter has no dims, one is not used."""

    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(values(WIDTH, 2))
        self.offset = nn.Parameter(values())
        self.spare = nn.Parameter(values(3))

    def forward(self, x, scale):
        hidden = (x @ self.weight + self.offset) * scale
        return {"rows": hidden * hidden * x[:, :2], "power": (hidden * hidden).sum()}


class Wide(nn.Module):
    """One weight of a chosen size."""

    def __init__(self, values, width):
        super().__init__()
        self.weight = nn.Parameter(values(WIDTH, width).float())
        self.bias = nn.Parameter(values(width).float())

    def forward(self, x):
        return x.float() @ self.weight + self.bias


class Moody(nn.Module):
    """Returns something else where the first row is marked."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.weight = nn.Parameter(torch.ones(WIDTH, 2))

    def forward(self, x):
        y, marked = x @ self.weight, bool(x[0, 0] == MARK)
        local = namedtuple("local", "y")  # not to be found by its name
        if self.case == "sparse":
            return y.to_sparse() if marked else y
        return {
            "containers": [y] if marked else (y,),
            "keys": {"b" if marked else "a": y},
            "numbers": (y, 2.5 if marked else 1.5),
            "counts": (y, y) if marked else (y, None),
            "widths": y[:, : 1 if marked else 2],
            "dims": y.sum(1) if marked else y,
            "dtypes": y.double() if marked else y,
            "local": local(y),
            "named": Pair(y, [y.sum(), "text"]),
        }[self.case]


def whole_numbers(seed, device):
    """A source of small whole numbers as float64: sums and products of them are exact, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randint(-3, 4, shape, generator=generator).double().to(device)


def normal_numbers(seed, device):
    """A source of float32 numbers whose sums round."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)


SOURCES = {"whole": whole_numbers, "normal": normal_numbers}


class RightSum:
    """Adds up from the right on each rank, of which each then has one block: another order than the tree's."""

    def __init__(self, add):
        self._values = {}

    def push(self, block, value):
        self._values[block] = value

    def sibling(self, block):
        return None

    @property
    def sums(self):
        flats = [self._values[block].flat for block in sorted(self._values, reverse=True)]
        return [FlatSum(functools.reduce(torch.add, flats), [])]


def a_block_a_rank(ranges, num_leaves):
    return tuple((Block(rank, 1),) for rank in range(len(ranges)))


def own_sums(communicator, items, ranges):
    """Sums that leave out the pieces of other processes."""
    local = LocalTransport()
    return make_sums(replace(communicator, transport=local, control=local), items, (ranges[communicator.rank],))


def own_join(data):
    """Puts zeros where what the workers have computed belongs."""
    head, tensors = decode(data)
    return head, [tensor.zero_() for tensor in tensors]


def breakers():
    """Ways to break what the processes exchange."""
    return {
        "own sum": [Patch(derivatives, "make_sums", own_sums), Patch(serve, "make_sums", own_sums)],
        "own join": [Patch(shared_forward, "decode", own_join)],
        "right sum": [Patch(buckets, "TreeSum", RightSum), Patch(pieces, "rank_blocks", a_block_a_rank)],
        "small buckets": [Patch(pieces, "BUCKET_BYTES", 64), Patch(calls, "BUCKET_BYTES", 64)],
    }


def bits(tensors):
    """Tensors as their forms and bytes, which travel and compare; None stays."""
    return [None if tensor is None else _bits(tensor) for tensor in tensors]


def _bits(tensor):
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


def cubic_derivatives(forward, device, source, num_rows):
    """First and second derivatives of a polynomial with respect to all there is."""
    values = SOURCES[source](3, device)
    module, x, scale, unrelated = Cubic(values), values(num_rows, WIDTH), values(), values(num_rows, 2)
    with torch.no_grad():
        scale += 4
    leaves = [x.requires_grad_(), scale.requires_grad_(), *module.parameters()]
    result = forward(module, x, scale)
    total = (result["rows"] * unrelated).sum() + 3 * result["power"].sum()
    part = torch.autograd.grad(result["power"].sum(), leaves, retain_graph=True, allow_unused=True)
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    again = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    penalty = sum(gradient.square().sum() for gradient in first if gradient is not None)
    second = torch.autograd.grad(penalty, leaves, allow_unused=True)
    values = [result["rows"], result["power"].sum(), total, *part, *first, *again, penalty, *second]
    return bits(values)


def nested_gradients(forward, device, num_rows, size):
    """Gradients of two backwards through a model's chunks of so many rows, which add up."""
    values = whole_numbers(5, device)
    module, x = Nested(values), values(num_rows, WIDTH).requires_grad_()
    result = forward(module, x) if forward else torch.cat([module(part) for part in x.split(size)])
    result.sum().backward(retain_graph=True)
    (result * 2).sum().backward()
    return bits([result, x.grad, module.weight.grad, module.sometimes.grad])


def freed(forward, device):
    """Whether results of a forward and a backward are free as soon as nothing refers to them."""
    values = whole_numbers(3, device)
    module, x, scale = Cubic(values), values(8, WIDTH), values()
    gc.collect()
    gc.disable()
    try:
        results = forward(module, x, scale)
        (results["rows"].sum() + results["power"].sum()).backward()
        references = [weakref.ref(result) for result in results.values()]
        del results
        return [reference() is None for reference in references]
    finally:
        gc.enable()


def wide_gradients(forward, device, source, num_rows, width):
    """A result and gradients of a chosen size."""
    values = SOURCES[source](9, device)
    module, x = Wide(values, width), values(num_rows, WIDTH).requires_grad_()
    result = forward(module, x)
    (result * result.detach()).sum().backward()
    return bits([result, x.grad, *[p.grad for p in module.parameters()]])


def on_ranks(communicator, program, num_microbatches, args, breaker=None):
    """Runs a program of this module with the forwards shared out; its result, None in a worker."""
    with applied(breakers().get(breaker, [])), driving(ScriptState(communicator)) as script:
        if script is None:
            return None

        def forward(module, *inputs):
            return chunked_forward(script, module, inputs, {}, num_microbatches=num_microbatches)

        with backward_on_this_thread(communicator.device):
            return globals()[program](forward, communicator.device, *args)


def plainly(program, *args):
    """The same in one piece, by PyTorch alone."""
    return globals()[program](lambda module, *inputs: module(*inputs), device_of(0), *args)


def moody(communicator, case, num_microbatches, num_rows):
    """The result or error of chunks that return different structures, and whether the next forward works."""
    with driving(ScriptState(communicator)) as script:
        if script is None:
            return None
        device = communicator.device
        module, other = Moody(case).to(device), Moody("named").to(device)
        x = torch.zeros(num_rows, WIDTH, device=device)
        x[-1, 0] = MARK
        answer: Any = None
        try:
            result = chunked_forward(script, module, (x,), {}, num_microbatches=num_microbatches)
            answer = type(result).__name__, [type(entry).__name__ for entry in result]
        except SamestepError as error:
            answer = type(error).__name__, str(error)
        after = chunked_forward(script, other, (x,), {}, num_microbatches=num_microbatches)
        return answer, after.left.tolist() == (x @ module.weight).tolist()


class Restless(nn.Module):
    """Leaves something behind on every module it has, or fails after it did."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.num_calls = 0
        self.seen = ()
        self.scratch = torch.zeros(2)

    def forward(self, x, fail=False):
        self.num_calls += 1
        self.seen = (*self.seen, self.num_calls)
        self.layer.last = x
        self.extra, self.extra_weight = nn.Identity(), nn.Parameter(torch.ones(1))
        self.layer.register_buffer("table", torch.ones(1))
        del self.scratch  # fails in the next chunk if it is not put back
        if fail:
            raise ArithmeticError("as asked for")
        return self.layer(x) * self.num_calls


def restless(communicator):
    """The results and the leftovers of a forward that writes attributes, also when it fails."""
    with driving(ScriptState(communicator)) as script:
        if script is None:
            return None
        module = Restless().to(communicator.device)
        names = names_in(module)
        x = torch.ones(4, WIDTH, device=communicator.device)
        values = []
        for fail in (False, True, False):
            with contextlib.suppress(ArithmeticError):
                values.append(chunked_forward(script, module, (x, fail), {}, num_microbatches=4))
        plain = torch.cat([module.layer(row) for row in x.split(1)])  # four rows at once may be rounded otherwise
        return {
            "the first call, in every chunk": [torch.equal(value, plain) for value in values],
            "left": (module.num_calls, module.seen),
            "names": names == names_in(module),
        }


def names_in(module):
    """The names of all that its parts have."""
    return [(prefix, *vars(part), *part._parameters, *part._buffers) for prefix, part in module.named_modules()]
