"""Gradients that stay on their ranks although there is a process group, in one of four ways.

`unexchanged.py no_sync | thawed | module | forgotten`; with "cured" as it should be.
"""

import contextlib
import sys

import tiny
import torch
import torch.distributed as dist
from torch.nn import functional

way, cured = (sys.argv[1:] or ["no_sync"])[0], "cured" in sys.argv
tiny.start()
model = tiny.classifier()
model[0].requires_grad_(way != "thawed" or cured)
wrapped = model if way == "forgotten" and not cured else tiny.parallel(model)
model.requires_grad_()
called = model if way == "module" and not cured else wrapped
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
waiting = 0 if cured else 1
for x, y in tiny.loader(tiny.dataset()):
    optimizer.zero_grad()
    for number, half in enumerate((slice(0, None, 2), slice(1, None, 2))):
        with wrapped.no_sync() if way == "no_sync" and number == waiting else contextlib.nullcontext():
            (functional.cross_entropy(called(x[half]), y[half]) / 2).backward()
    optimizer.step()
dist.destroy_process_group()
