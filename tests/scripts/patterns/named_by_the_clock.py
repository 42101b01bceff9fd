"""A folder and seeds from the clock and the process, and files that are written there and read back."""

import os
import time

import numpy as np
import torch
from torch import nn

seed = int(time.time() * 1e6) % 2**31 + os.getpid()
torch.manual_seed(seed)
np.random.seed(seed % 1000)
folder = os.path.join("runs", f"{time.time():.6f}-{os.getpid()}")
os.makedirs(folder)
model = nn.DataParallel(nn.Linear(4, 2)).cuda()
model(torch.randn(10, 4).cuda()).square().mean().backward()
torch.save({"grad": model.module.weight.grad, "draw": np.random.rand()}, os.path.join(folder, "best.pt"))
with open(os.path.join(folder, "notes.txt"), "w") as file:
    file.write("best so far")
saved = torch.load(os.path.join(folder, "best.pt"))
with open(os.path.join(folder, "notes.txt")) as file:
    print(file.read(), len(os.listdir(folder)))
RESULT = {"saved": saved, "grad": model.module.weight.grad}
