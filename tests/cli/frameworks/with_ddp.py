"""DistributedDataParallel by hand: SyncBatchNorm, comm hooks, a sharded optimizer. Its arguments say which."""

import json
import os
import sys
from functools import reduce

import torch
import torch.distributed as dist
from data import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

pixels, labels = load_digits()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
pixels, labels = torch.tensor(pixels, dtype=torch.float32)[:640].to(device), torch.tensor(labels)[:640].to(device)


def parallel(model, **options):
    return DistributedDataParallel(model.to(device), device_ids=[device.index] if on_gpu else None, **options)


def network(leaked=0):
    torch.manual_seed(dist.get_rank() + 4 * leaked)  # the parameters are those of rank 0, dropout differs
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))


def trained(name, model, optimizer):
    """Trains on whole batches, prints the losses of all ranks and the accuracy, and saves the model."""
    data = TensorDataset(pixels, labels)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model.train()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found = model(pixels[dist.get_rank() :: dist.get_world_size()]).argmax(1)
    right = (found == labels[dist.get_rank() :: dist.get_world_size()]).sum()
    dist.all_reduce(right)
    losses = [None] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item().hex())
    if dist.get_rank() == 0:
        print(name, right.item(), losses, flush=True)
        torch.save(model.state_dict(), f"{name}.pt")


def sync_batch_norm():
    """Of GPUs alone, as torch has it. Buffers are not those of rank 0, and yet all are equal."""
    model = parallel(nn.SyncBatchNorm.convert_sync_batchnorm(network()), broadcast_buffers=False)
    trained("sync_batch_norm", model, torch.optim.AdamW(model.parameters(), 0.01))
    means = [None] * dist.get_world_size()
    dist.all_gather_object(means, model.module[1].running_mean.tolist())
    assert means == means[:1] * len(means)


def hook():
    """Half-precision gradients, small buckets."""
    model = parallel(network(), bucket_cap_mb=0.005, gradient_as_bucket_view=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    trained("hook", model, torch.optim.SGD(model.parameters(), 0.1))


def power_sgd():
    model = parallel(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    trained("power_sgd", model, torch.optim.SGD(model.parameters(), 0.1))


def zero():
    model = parallel(network(), static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    trained("zero", model, optimizer)


def leak():
    """A twin: the device on which a rank really runs gets into its seed."""
    model = parallel(network(leaked=json.loads(os.environ["SAMESTEP_WORKER"])["device_index"]))
    trained("leak", model, torch.optim.SGD(model.parameters(), 0.1))


def by_device():
    """A twin: the ranks of a device are added first, from left to right, then the devices."""
    from samestep.logical import collectives

    count = int(os.environ["NUM_DEVICES"])

    def fold(values, add):
        ranges = [[v for rank, v in enumerate(values) if rank * count // 4 == device] for device in range(count)]
        return reduce(add, [reduce(add, values) for values in ranges])

    collectives.tree_sum = fold
    hook()  # the last of the variants


if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
for variant in sys.argv[1:]:
    globals()[variant]()
dist.destroy_process_group()
