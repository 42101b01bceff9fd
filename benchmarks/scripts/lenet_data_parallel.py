"""LeNet under `nn.DataParallel`, as its users write it; with the argument `plain` without it."""

import sys

import torch
from lenet import BATCH_SIZE, Clock, LeNet, made_up_images
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = LeNet().to(device)
if "plain" not in sys.argv:
    model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(made_up_images(), batch_size=BATCH_SIZE, shuffle=True)

clock = Clock()
for _ in range(3):
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        clock.tick()
clock.report()
