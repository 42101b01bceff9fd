"""Layouts of parallelism as scripts have them, over four ranks: `python layouts.py NAME DEVICE` for one of `LAYOUTS`.

Rank 0 prints losses and sums of the parameters. A twin, "leak", draws its data by the device that the rank really has.
"""

import json
import os
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, randn
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS = 16, 24


def show(*values):
    """Prints numbers; those that each rank has a part of are added first."""
    for value in values:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if rank == 0:
            print(float(value).hex(), flush=True)


def show_sum(*values):
    for value in values:
        dist.all_reduce(total := value.detach().double().clone())
        show(total)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def parallel(model, mesh):
    """By torch's plans: rows and columns, the sequence between them, and the classes of the loss."""
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    block = {"norm": SequenceParallel(use_local_output=True), "up": up, "down": down}
    plans = [embedding, block, block, SequenceParallel(), head]
    for index, plan in enumerate(plans):
        parallelize_module(model[index], mesh, plan)
    return model


def train(model, own, loss_of, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(own)
    for _ in range(steps):
        x, y = (torch.randint(WORDS, (3, 8), generator=drawn).to(device) for _ in range(2))
        loss = loss_of(model, x, y)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
        show(loss, norm)
    show(sum(each.full_tensor().double().sum() for each in model.parameters()))


def over_classes(model, x, y):
    with loss_parallel():
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
    return loss.detach()


def tensor():
    """Four ranks share each matrix."""
    train(parallel(language_model(), init_device_mesh(device.type, (world_size,))), 0, over_classes)


def data_by_tensor():
    """Two copies of the data axis by FSDP2, of two ranks each."""
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = parallel(language_model(), mesh["tp"])
    for each in (*model[1:3], model):
        fully_shard(each, mesh=mesh["dp"])
    train(model, mesh["dp"].get_local_rank(), over_classes)


def hybrid():
    """FSDP2 within pairs of ranks, copies between these."""
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = language_model().to(device)
    for each in (*model[1:3], model):
        fully_shard(each, mesh=mesh)

    def loss_of(model, x, y):
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        dist.all_reduce(total := loss.detach())
        return total

    place = json.loads(os.environ["SAMESTEP_WORKER"])["device_index"] if "leak" in sys.argv else 0
    train(model, rank + 10 * place, loss_of)


def placements():
    """Tensors of uneven shards and of partial sums are calculated with, and change their placements."""
    mesh = init_device_mesh(device.type, (2, world_size // 2))
    drawn = torch.Generator().manual_seed(5)
    x, w = (torch.randn(*shape, generator=drawn).to(device) for shape in ((7, 10), (10, 5)))
    a = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    b = distribute_tensor(w, mesh, [Replicate(), Shard(0)]).requires_grad_()
    c = a @ b
    show(c.sum(), c.softmax(-1).std(), c.redistribute(mesh, [Shard(1), Replicate()]).square().mean())
    c.redistribute(mesh, [Replicate(), Replicate()]).sin().sum().backward()
    show(a.grad.square().sum(), b.grad.square().sum())
    part = DTensor.from_local(torch.full((5,), rank / 3).to(device), mesh, [Partial(), Partial("avg")])
    show(part.redistribute(mesh, [Shard(0), Replicate()]).sum())


class Exchange(torch.autograd.Function):
    """Rows to each rank, of which each may have another number; their gradients come back."""

    @staticmethod
    def forward(ctx, x, received, sent, group):
        ctx.sizes = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        received, sent, group = ctx.sizes
        return Exchange.apply(gradient, sent, received, group), None, None, None


def mixture(exchange, group):
    """Each token goes to the two experts that a router chooses, of two on each rank of the group, and back."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(3)
    router, all_experts = nn.Linear(8, 2 * ranks).to(device), [nn.Linear(8, 8) for _ in range(2 * ranks)]
    experts = nn.ModuleList(all_experts[2 * own : 2 * own + 2]).to(device)
    routed = DistributedDataParallel(router)
    optimizer = torch.optim.AdamW([*router.parameters(), *experts.parameters()], lr=0.02)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(11 + 2 * rank, 8, generator=drawn).to(device)
        weights, chosen = routed(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=2 * ranks).view(ranks, 2)
        dist.all_to_all_single(theirs := torch.empty_like(counts), counts, group=group)
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        tokens = exchange(x.repeat_interleave(2, 0)[order], received, sent, group)
        which, out = (
            torch.arange(2).repeat(ranks).to(device).repeat_interleave(theirs.flatten()),
            torch.zeros_like(tokens),
        )
        for index, expert in enumerate(experts):
            rows = (which == index).nonzero()[:, 0]
            out = out.index_copy(0, rows, expert(tokens[rows]))
        back = exchange(out, sent, received, group)
        mixed = torch.zeros_like(back).index_copy(0, order, back).view(-1, 2, 8) * weights[..., None]
        loss = (mixed.sum(1) - x.flip(1)).square().mean()
        loss.backward()
        for each in experts.parameters():
            dist.all_reduce(each.grad, group=copies) if (copies := COPIES.get(group)) else None
        optimizer.step(), optimizer.zero_grad()
        show_sum(loss)
    show_sum(*(each.square().sum() for each in (*router.parameters(), *experts.parameters())))


COPIES = {}  # of the experts of a group's ranks, the group of those that have the same ones


def experts():
    mixture(Exchange.apply, dist.group.WORLD)
    mixture(functional.all_to_all_single_autograd, dist.group.WORLD)
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "ep"))
    COPIES[mesh["ep"].get_group()] = mesh["dp"].get_group()
    mixture(Exchange.apply, mesh["ep"].get_group())


def collectives():
    """Backward through functional collectives."""
    drawn, group = torch.Generator().manual_seed(rank), dist.group.WORLD
    x = torch.randn(8, 5, generator=drawn).to(device).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(x, 0, group)
    scattered = functional.reduce_scatter_tensor_autograd(gathered.sin(), "sum", 0, group)
    everywhere = functional.all_reduce(scattered.detach(), "sum", group)
    (scattered * everywhere.cos()).square().sum().backward()
    show_sum(gathered.sum(), scattered.sum(), x.grad.square().sum())


def attention(attend):
    """A layer of attention whose rows are divided over the ranks."""
    torch.manual_seed(0)
    inner, outer = nn.Linear(WIDTH, 3 * WIDTH).to(device), nn.Linear(WIDTH, WIDTH).to(device)
    parameters = [*inner.parameters(), *outer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        loss = attend(inner, outer, *(torch.randn(2, 32, WIDTH, generator=drawn).to(device) for _ in range(2)))
        for each in parameters:
            dist.all_reduce(each.grad)
        optimizer.step(), optimizer.zero_grad()
        show_sum(loss)
    show(*(each.square().sum() for each in parameters))


def heads(x):
    return x.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)


def swapped(x, there, here):
    """Parts along one dimension in exchange for those along another."""
    parts, sizes = torch.stack(x.chunk(world_size, there)), [1] * world_size
    return torch.cat([*functional.all_to_all_single_autograd(parts, sizes, sizes, dist.group.WORLD).unbind()], here)


def all_to_all(inner, outer, x, y):
    x, y = (each.chunk(world_size, 1)[rank] for each in (x, y))
    q, k, v = (swapped(each, 1, 2) for each in heads(inner(x)))
    found = swapped(scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)
    loss = (outer(found.transpose(1, 2).flatten(2)) - y).square().mean() / world_size
    loss.backward()
    return loss


def ring(inner, outer, x, y):
    mesh = init_device_mesh(device.type, (world_size,))
    with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]):
        found = nn.functional.scaled_dot_product_attention(*heads(inner(x)), is_causal=True)
        loss = (outer(found.transpose(1, 2).flatten(2)) - y).square().mean() / world_size
        loss.backward()
    return loss


def whole(inner, outer, x, y):
    """What both must come to, but for the rounding: on every rank its part of the loss of all rows."""
    found = scaled_dot_product_attention(*heads(inner(x)), is_causal=True)
    loss = (outer(found.transpose(1, 2).flatten(2)) - y).square().mean() / world_size
    loss.backward()
    return loss


def draws():
    """Copies of a tensor have the same numbers, also where ranks have other seeds; shards have not."""
    mesh = init_device_mesh(device.type, (2, world_size // 2))
    torch.manual_seed(rank)
    drawn = randn(4, 6, device_mesh=mesh, placements=[Shard(0), Replicate()])
    kept = dropout(distribute_tensor(torch.ones(4, 32, device=device), mesh, [Replicate(), Shard(1)]), 0.5)
    for each, alike in (drawn, [(0, 1), (2, 3)]), (kept, [(0, 2), (1, 3)]):
        gathered = [torch.empty_like(each.to_local()) for _ in range(world_size)]
        dist.all_gather(gathered, each.to_local().contiguous())
        for one in range(world_size):
            for other in range(one):
                assert torch.equal(gathered[one], gathered[other]) == ((other, one) in alike), (one, other)
        show(each.double().sum())
    assert torch.equal(drawn, drawn)


def pipeline(schedule, cuts):
    """Stages of unlike numbers of layers, dealt to the ranks in turn; four microbatches."""
    layers = [*language_model(), nn.Dropout(0.1)]
    layers.insert(-2, Block())
    bounds = [0, *cuts, len(layers)]
    parts = [nn.Sequential(*layers[start:stop]).to(device) for start, stop in pairwise(bounds)]
    own = range(rank, len(parts), world_size)
    stages = [PipelineStage(parts[index], index, len(parts), device) for index in own]

    def loss_of(found, y):
        return cross_entropy(found.flatten(0, 1), y.flatten(), reduction="sum") / 64

    run = schedule(stages if len(stages) > 1 else stages[0], 4, loss_fn=loss_of, scale_grads=False)
    parameters = [each for index in own for each in parts[index].parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = (torch.randint(WORDS, (8, 8), generator=drawn).to(device) for _ in range(2))
        losses = []
        run.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == world_size - 1 else {}))
        optimizer.step(), optimizer.zero_grad()
        show_sum(torch.stack(losses).sum() if losses else torch.zeros(()))
    show_sum(sum((each.detach().double().sum() for each in parameters), torch.zeros((), dtype=torch.float64)))


LAYOUTS = {
    "tensor": tensor,
    "data by tensor": data_by_tensor,
    "hybrid": hybrid,
    "placements": placements,
    "experts": experts,
    "collectives": collectives,
    "all to all": lambda: attention(all_to_all),
    "ring": lambda: attention(ring),
    "whole": lambda: attention(whole),
    "draws": draws,
    "GPipe": lambda: pipeline(ScheduleGPipe, [1, 3, 4]),
    "1F1B": lambda: pipeline(Schedule1F1B, [1, 2, 5]),
    "interleaved": lambda: pipeline(ScheduleInterleaved1F1B, [1, 2, 3, 4, 5, 6, 7]),
}

if __name__ == "__main__":
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name in sys.argv[2].split(","):
        if rank == 0:
            print(name, flush=True)
        LAYOUTS[name]()
    dist.destroy_process_group()
