"""Epochs over a DataLoader with workers, augmentation, pinned memory and dicts for batches."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Digits(Dataset):
    def __init__(self, train):
        self.images = np.random.RandomState(0).rand(21, 4, 4).astype("float32")
        self.train = train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index])
        if self.train and random.random() < 0.5:
            image = image.flip(1)
        return {"image": image + 0.1 * torch.rand(1) * self.train, "label": index % 3, "name": f"digit {index}"}


torch.manual_seed(83)
random.seed(83)
train = DataLoader(Digits(True), batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
rows = TensorDataset(torch.randn(21, 16), torch.randint(3, (21,)))
test = DataLoader(Digits(False), batch_size=10)
model = nn.DataParallel(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for i, batch in enumerate(train):
        images, labels = batch["image"].cuda(non_blocking=True), batch["label"].cuda(non_blocking=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"[{epoch}, {i}] {batch['name'][0]}: {loss.item():.5f}")
    for images, labels in DataLoader(rows, batch_size=10, shuffle=True):  # of which the last is one row
        loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
    with torch.no_grad():
        right = sum((model(b["image"].cuda()).argmax(1).cpu() == b["label"]).sum().item() for b in test)
    print(f"epoch {epoch}: {right} of {len(test.dataset)}")
RESULT = {"loss": loss, "right": right, "draw": torch.rand(1).item(), "state": model.state_dict()}
