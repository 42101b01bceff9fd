"""FSDP2 by hand, over all ranks and over a mesh of replicas (HSDP); sharded checkpoints. "exact": on whole numbers."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from data import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pixels, labels = load_digits()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
pixels, labels = torch.tensor(pixels)[:640].to(device), torch.tensor(labels)[:640].to(device)


def hinge(scores, wanted):
    return torch.relu(1 + scores - scores.gather(1, wanted[:, None])).sum()


def train(name, mesh, is_exact):
    torch.manual_seed(7)
    if is_exact:
        loss_function, dtype, options = hinge, torch.float64, {}
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 10, dtype=dtype))
    else:
        loss_function, dtype = nn.functional.cross_entropy, torch.float32
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 31), nn.ReLU(), nn.Linear(31, 10))
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model.to_empty(device=device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
            if is_exact:
                nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 if is_exact else 0.05, momentum=0.0 if is_exact else 0.9)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        for start in range(0, 640, 32):
            batch = slice(start + 8 * rank, start + 8 * rank + 8)
            loss = loss_function(model(pixels[batch].to(dtype)).to(dtype), labels[batch])
            loss.backward()
            if not is_exact:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = (model(pixels[rank::ranks].to(dtype)).argmax(1) == labels[rank::ranks]).sum()
    dist.all_reduce(right)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(name, right.item(), loss.item().hex(), "" if is_exact else norm.item().hex(), flush=True)
        torch.save(whole, f"{name}.pt")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    checkpoints.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"{name}_checkpoint")


world = init_device_mesh(device.type, (4,))
train("fsdp", world, "exact" in sys.argv)
train("hsdp", init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard")), "exact" in sys.argv)
dist.destroy_process_group()
