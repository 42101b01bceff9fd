"""Accelerate: `prepare` and `accelerator.backward`, as its quick tour shows; two processes by `accelerate launch`.

It tracks and prints nothing unless asked.
"""

from accelerate import Accelerator
from gate import Gate
from torch.utils.data import DataLoader
from workloads import task

told = task()
accelerator = Accelerator(cpu=True)
model = told.workload.make_model()
optimizer = told.workload.make_optimizer(model.parameters())
loader = DataLoader(told.dataset, batch_size=told.local_batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert accelerator.num_processes == told.num_processes
gate = Gate(told.gate, told.warm_up)
while True:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = told.workload.loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        gate.step()
