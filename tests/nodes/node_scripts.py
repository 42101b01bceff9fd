"""Scripts that tests run on several nodes."""

SMALL = """
import torch
import samestep

run = samestep.Run(global_batch_size=32)
layers = torch.nn.Linear(8, 512), torch.nn.Dropout(0.1), torch.nn.Linear(512, 512), torch.nn.Linear(512, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters())
step = run.train_step(model, optimizer, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
nodes, between = getattr(run.communicator.transport, "nodes", None), []
if nodes is not None:
    exchange = nodes.between.exchange
    nodes.between.exchange = lambda *parts: between.append(1) or exchange(*parts)
for batch in run.loader((torch.randn(96, 8), torch.randn(96, 1))):
    step(batch)
run.print("digest", samestep.state_digest(model, optimizer))
run.print("by nodes", len(between) > 0)
"""
"""Trains with large enough a model for sums to go by nodes, and says whether they did."""

ENDS_FIRST = """
import os, sys, time

if "FIRST" in os.environ:
    sys.exit(7)
time.sleep(60)
"""
"""Fails at once on the machine that has the variable; the other one's worker does not notice."""

ONCE = """
import os, sys, time
import torch
from torch import nn
import helpers

rows = torch.load("rows.pt")
print("of torchrun", [name for name in os.environ if name.startswith("MASTER_")])
os.environ["SET"] = "3"
torch.manual_seed(0)
model = nn.DataParallel(helpers.Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(int(sys.argv[1])):
    loss = (model(rows) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number == 0:
        print("begun", file=sys.stderr, flush=True)
    if len(sys.argv) > 2:
        exec(sys.argv[2])
    os.environ["SET"] = "4"
print("digest", sum(p.double().sum().item() for p in model.parameters()).hex())
"""
"""A script for one process with data, and a module of its own beside it, which only its own machine has."""

HELPERS = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        print("in", os.environ["HOME"], "TORCHELASTIC_RUN_ID" in os.environ)
        return self.layers(x) * float(os.environ["SET"]) + float(os.environ["GIVEN"])
"""

RANKS = """
import json, os
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = (model(torch.randn(16, 8)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
places = [None] * dist.get_world_size()
told = json.loads(os.environ["SAMESTEP_WORKER"])
shared = told["device_index"] if told["fds"] else ""
place = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), shared
dist.all_gather_object(places, place)
if rank == 0:
    print("places", places)
    print("digest", sum(p.double().sum().item() for p in model.parameters()).hex())
dist.destroy_process_group()
"""
"""A script with DistributedDataParallel; it says where its ranks are."""
