"""Small wrapped forwards, which tests run on every rank of a world; and ways to break the exchange between ranks."""

import contextlib
from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import nn

from samestep.errors import SamestepError
from samestep.scripts.adoption import Adoption
from samestep.scripts.patch import Patch, applied
from samestep.scripts.wrapped import exchange, regions
from samestep.scripts.wrapped.forward import chunked_forward

WIDTH = 5
MARK = 50.0
OUTPUT_DTYPES = ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex64", "complex128")


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


class Blend(nn.Module):
    """Parameters of several dtypes, one that only chunks with a marked first row use, and one that none uses."""

    def __init__(self, values):
        super().__init__()
        self.usual = nn.Parameter(values(WIDTH, 2).float())
        self.wide = nn.Parameter(values(WIDTH, 2).double())
        self.short = nn.Parameter(values(WIDTH, 2).bfloat16())
        self.rare = nn.Parameter(values(2).bfloat16())
        self.spare = nn.Parameter(values(2).double())

    def forward(self, x):
        result = x @ self.wide + (x.float() @ self.usual).double() + (x.bfloat16() @ self.short).double()
        return result + self.rare if x[0, 0] == 3 else result


class Wide(nn.Module):
    """One weight of a chosen size."""

    def __init__(self, values, width):
        super().__init__()
        self.weight = nn.Parameter(values(WIDTH, width).float())
        self.bias = nn.Parameter(values(width).float())

    def forward(self, x):
        return x.float() @ self.weight + self.bias


class Looking(nn.Module):
    """Says how its input lies in memory."""

    def forward(self, x):
        flags = [x.is_contiguous(), x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)]
        return x * x, *[torch.tensor(flag) for flag in flags]


class Converting(nn.Module):
    """Rows and numbers of many dtypes."""

    def forward(self, x):
        rows = {name: (x * 3 - 2).clamp(min=0).to(getattr(torch, name)) for name in OUTPUT_DTYPES}
        numbers = {f"{name} number": value.flatten()[0] for name, value in rows.items()}
        return rows | numbers | {"none": x[:, :0], "flipped": x.t().flip(0).t(), "repeated": x[:, :1].expand(-1, 4)}


class FirstColumn(nn.Module):
    """Gives a part of its rows: of one row, a tensor of one number whose stride is not 1."""

    def forward(self, x):
        return x[:, 0]


class Conjugating(nn.Module):
    """Gives and differentiates what is conjugated when it is read only."""

    def forward(self, x):
        return x.conj()


class Moody(nn.Module):
    """Returns something else where the first row is marked."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.weight = nn.Parameter(torch.ones(WIDTH, 2))

    def forward(self, x):
        y, marked = x @ self.weight, bool(x[0, 0] == MARK)
        local = namedtuple("local", "y")  # a class that does not pickle
        return {
            "containers": [y] if marked else (y,),
            "keys": {"b" if marked else "a": y},
            "numbers": (y, 2.5 if marked else 1.5),
            "counts": (y, y) if marked else (y, None),
            "widths": y[:, : 1 if marked else 2],
            "dims": y.sum(1) if marked else y,
            "dtypes": y.double() if marked else y,
            "sparse": y.to_sparse() if marked else y,
            "unpicklable": local(y),
            "named": Pair(y, [y.sum(), "text"]),
        }[self.case]


def whole_numbers(seed):
    """A source of small whole numbers as float64: sums and products of them are exact, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randint(-3, 4, shape, generator=generator).double()


def normal_numbers(seed):
    """A source of float32 numbers whose sums round."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


SOURCES = {"whole": whole_numbers, "normal": normal_numbers}


def own_sum(communicator, ranges, likes, pieces):
    """Leaves out what the other ranks have."""
    present = [[piece for piece in column if piece is not None] for column in pieces]
    return [torch.stack(column).sum(0) if column else None for column in present]


def left_sum(communicator, ranges, likes, pieces):
    """Adds up from the left on each rank, then over the ranks: another order than the tree's."""
    totals = []
    for like, column in zip(likes, pieces, strict=True):
        total = torch.zeros(like.numel(), dtype=like.dtype)
        for piece in column:
            if piece is not None:
                total += piece.reshape(-1)
        if communicator.world_size > 1:
            total = communicator.transport.add(total).wait()
        totals.append(total.view(like.shape))
    return totals


def own_join(adoption, ranges, items, pieces):
    """Puts zeros where the other ranks' pieces belong."""
    wholes = []
    for item, column in zip(items, pieces, strict=True):
        rows = [torch.zeros(item.piece_shape(chunk), dtype=item.dtype) for chunk in range(ranges[-1].stop)]
        for chunk, piece in zip(ranges[adoption.rank], column, strict=True):
            rows[chunk] = piece.detach()
        wholes.append(item.joined(rows))
    return wholes


BREAKERS = {
    "own sum": Patch(regions, "sum_pieces", own_sum),
    "left sum": Patch(regions, "sum_pieces", left_sum),
    "own join": Patch(regions, "join_pieces", own_join),
    "small buckets": Patch(exchange, "BUCKET_BYTES", 64),
}


def bits(tensors):
    """Tensors as their forms and bytes, which travel and compare; None stays."""
    return [None if tensor is None else _bits(tensor) for tensor in tensors]


def _bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


def cubic_derivatives(forward, source, num_rows):
    """First and second derivatives of a polynomial with respect to all there is.

    Args:
        forward: `forward(module, *args)` calls a module.
        source: of `SOURCES`.
        num_rows: rows of the batch.
    """
    values = SOURCES[source](3)
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


def chained_gradients(forward, source, num_rows):
    """Three forwards, one of them on the results of another, and a penalty on the gradient of all."""
    values = SOURCES[source](5)
    first, second, third = Wide(values, WIDTH), Wide(values, 2), Wide(values, 3)
    x = values(num_rows, WIDTH).float().requires_grad_()
    hidden = forward(first, x)
    total = (forward(second, hidden) ** 2).sum() + forward(third, x).sum() * forward(third, hidden).sum()
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    (total + slope.square().sum()).backward()
    grads = [p.grad for module in (first, second, third) for p in module.parameters()]
    return bits([total, slope, x.grad, *grads])


def blend_gradients(forward, source, num_rows):
    """Gradients of parameters of several dtypes, some of which not every chunk uses."""
    values = SOURCES[source](7)
    module, x = Blend(values), values(num_rows, WIDTH)
    x[:, 0] = 1
    x[0, 0] = 3
    forward(module, x).sum().backward()
    return bits([p.grad for p in module.parameters()])


def wide_gradients(forward, source, num_rows, width):
    """A result and gradients of a chosen size."""
    values = SOURCES[source](9)
    module, x = Wide(values, width), values(num_rows, WIDTH).requires_grad_()
    result = forward(module, x)
    (result * result.detach()).sum().backward()
    return bits([result, x.grad, *[p.grad for p in module.parameters()]])


def layouts(forward, name):
    """What a module finds of an input that lies unusually in memory, and the gradient that comes back."""
    values = whole_numbers(11)
    x = {
        "transposed": lambda: values(3, 8).t(),
        "sliced": lambda: values(8, 6)[:, ::2],
        "expanded": lambda: values(1, 3).expand(8, 3),
        "channels last": lambda: values(8, 2, 3, 3).contiguous(memory_format=torch.channels_last),
    }[name]()
    leaf = x.detach().requires_grad_()
    square, *flags = forward(Looking(), leaf)
    (square * torch.arange(square.numel()).view(square.shape)).sum().backward()
    return bits([square, leaf.grad]), [flag.unique().tolist() for flag in flags], leaf.grad.stride() == x.stride()


def converted(forward, num_rows):
    """Results of many dtypes, by name."""
    result = forward(Converting(), torch.arange(float(2 * num_rows)).view(num_rows, 2))
    return dict(zip(result, bits(result.values()), strict=True))


def first_column(forward, num_rows):
    """A part of each row, and the gradient of the input."""
    x = whole_numbers(15)(num_rows, 2).requires_grad_()
    result = forward(FirstColumn(), x)
    (result * result).sum().backward()
    return bits([result, x.grad])


def conjugated(forward, num_rows):
    """A conjugated result, and the gradient of the input."""
    values = whole_numbers(13)
    x = torch.complex(values(num_rows, 2), values(num_rows, 2)).requires_grad_()
    result = forward(Conjugating(), x)
    (result * result).sum().abs().backward()
    return bits([result, x.grad])


def on_ranks(communicator, program, num_microbatches, args, breaker=None):
    """Runs a program of this module with the forwards shared out; its result and the chunks that ran here."""
    adoption = Adoption(communicator)

    def forward(module, *inputs):
        return chunked_forward(adoption, module, inputs, {}, num_microbatches=num_microbatches)

    with applied([BREAKERS[breaker]] if breaker else []):
        result = globals()[program](forward, *args)
    return result, adoption.chunks_run


def plainly(program, *args):
    """The same in one piece, by PyTorch alone."""
    return globals()[program](lambda module, *inputs: module(*inputs), *args)


def moody(communicator, case, num_microbatches, num_rows):
    """What becomes of chunks that return different things, and of a forward after them.

    Returns:
        The result's class and entries or the error's class and message, and whether the ranks are still in step.
    """
    adoption, module = Adoption(communicator), Moody(case)
    x = torch.zeros(num_rows, WIDTH)
    x[-1, 0] = MARK
    answer: Any = None
    try:
        result = chunked_forward(adoption, module, (x,), {}, num_microbatches=num_microbatches)
        answer = type(result).__name__, [type(entry).__name__ for entry in result]
    except SamestepError as error:
        answer = type(error).__name__, str(error)
    after = chunked_forward(adoption, Moody("named"), (x,), {}, num_microbatches=num_microbatches)
    return answer, after.left.tolist() == (x @ module.weight).tolist()


class Growing(nn.Module):
    """Replaces a buffer by a longer one when it is too short."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(0))

    def forward(self, x):
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(float(x.shape[1]))
        return x + self.table[: x.shape[1]]


def inferred(communicator, widths):
    """Sums of a forward in inference mode, batch by batch."""
    adoption, module = Adoption(communicator), Growing()
    sums = []
    for width in widths:
        with torch.inference_mode():
            result = chunked_forward(adoption, module, (torch.ones(4, width),), {}, num_microbatches=2)
        sums.append(result.sum().item())
    return sums


class Restless(nn.Module):
    """Leaves something behind on every module it has, or fails after it did."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.num_calls = 0
        self.seen = ()

    def forward(self, x, fail=False):
        self.num_calls += 1
        self.seen = (*self.seen, self.num_calls)
        self.layer.last = x
        self.extra = nn.Identity()
        if fail:
            raise ArithmeticError("as asked for")
        return self.layer(x) * self.num_calls


def restless(communicator):
    """What a forward that writes attributes returns and leaves behind, also when it fails."""
    adoption, module = Adoption(communicator), Restless()
    names, children = set(vars(module.layer)), list(module._modules)
    values = []
    for fail in (False, True, False):
        with contextlib.suppress(ArithmeticError):
            module_input = (torch.ones(4, WIDTH), fail)
            values.append(chunked_forward(adoption, module, module_input, {}, num_microbatches=4))
    plain = module.layer(torch.ones(4, WIDTH))
    return {
        "the first call, in every chunk": [torch.equal(value, plain) for value in values],
        "left": (module.num_calls, module.seen, set(vars(module.layer)) == names, list(module._modules) == children),
    }


def input_of_one(communicator, num_rows):
    """The result of a forward whose input is one column of a table of float64."""
    column = whole_numbers(17)(num_rows, 3)[:, 0]
    result = chunked_forward(Adoption(communicator), nn.Identity(), (column,), {}, num_microbatches=2)
    return result.tolist() == column.tolist()
