"""The limit: one cached batch, forward, loss, backward, update, and nothing else.

With two processes each computes its half of the batch and talks to nobody: the limit without communication.
"""

from gate import Gate
from workloads import task

told = task()
batch = told.inputs[: told.local_batch_size].clone(), told.targets[: told.local_batch_size].clone()
model = told.workload.make_model()
optimizer = told.workload.make_optimizer(model.parameters())
gate = Gate(told.gate, told.warm_up)
while True:
    told.workload.loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    gate.step()
