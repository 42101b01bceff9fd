"""A progress bar around the loop."""

import torch
from torch import nn
from tqdm import tqdm

torch.manual_seed(40)
model = nn.DataParallel(nn.Linear(4, 1)).cuda()
bar = tqdm(range(3), desc="training", ascii=True)
for _ in bar:
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    loss.backward()
    bar.set_postfix(loss=f"{loss.item():.4f}")
    tqdm.write(f"loss {loss.item():.4f}")
RESULT = {"loss": loss, "grad": model.module.weight.grad}
