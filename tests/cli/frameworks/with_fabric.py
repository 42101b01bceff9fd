"""Lightning Fabric: a loop of one's own, with metrics of torchmetrics over all ranks."""

import torch
from data import load_digits
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

fabric = Fabric(accelerator="auto", devices=4, strategy="ddp")
fabric.launch()
fabric.seed_everything(7 + fabric.global_rank)

x, y = load_digits()
data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
with fabric.rank_zero_first():
    train, test = torch.utils.data.random_split(data, [1400, 397], torch.Generator().manual_seed(3))
train_loader = fabric.setup_dataloaders(DataLoader(train, batch_size=16, shuffle=True))

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)

scores = MetricCollection(
    {
        "accuracy": MulticlassAccuracy(num_classes=10),
        "auroc": MulticlassAUROC(
            num_classes=10, thresholds=None
        ),  # gathers all scores, of which ranks have more or less
        "confusion": MulticlassConfusionMatrix(num_classes=10),
    }
).to(fabric.device)
mean_loss = MeanMetric(dist_sync_on_step=True).to(fabric.device)
share = torch.utils.data.Subset(test, range(fabric.global_rank, len(test), fabric.world_size))
for epoch in range(2):
    model.train()
    train_loader.sampler.set_epoch(epoch)
    for index, (inputs, labels) in enumerate(train_loader):
        is_accumulating = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss)
        step_mean = mean_loss(loss.detach())
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    for inputs, labels in DataLoader(share, batch_size=20):
        with torch.no_grad():
            scores.update(model(fabric.to_device(inputs)), fabric.to_device(labels))
    found = {name: value.tolist() for name, value in scores.compute().items()}
    every = fabric.all_gather(loss.detach()).tolist()
    fabric.print(epoch, fabric.world_size, found, mean_loss.compute().item().hex(), step_mean.item().hex(), every)
    scores.reset()
    mean_loss.reset()
total = fabric.all_reduce(torch.tensor(float(fabric.global_rank), device=fabric.device), reduce_op="mean")
fabric.print(fabric.broadcast({"mean of the ranks": total.item()}))
fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
fabric.barrier()
