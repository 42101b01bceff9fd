"""Lightning Fabric: `launch`, `setup`, `setup_dataloaders` and `fabric.backward`, as "Convert PyTorch code" shows.

It logs nothing unless asked.
"""

from gate import Gate
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from workloads import task

told = task()
fabric = Fabric(accelerator="cpu", devices=told.num_processes, strategy="ddp" if told.num_processes > 1 else "auto")
fabric.launch()
model = told.workload.make_model()
optimizer = told.workload.make_optimizer(model.parameters())
loader = DataLoader(told.dataset, batch_size=told.local_batch_size, shuffle=True)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
assert fabric.world_size == told.num_processes
gate = Gate(told.gate, told.warm_up)
while True:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = told.workload.loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        gate.step()
