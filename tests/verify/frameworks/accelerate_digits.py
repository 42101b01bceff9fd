"""Accelerate, as its examples write a training: prepare, backward, a scheduler by the step, gather_for_metrics."""

import sys

import digits
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv


def main():
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True) if FIXED else None
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(42)
    train_dataloader = DataLoader(
        TensorDataset(*digits.load(0, 61 if "uneven" in sys.argv else 240)), shuffle=True, batch_size=24
    )
    eval_dataloader = DataLoader(TensorDataset(*digits.load(240, 291)), shuffle=False, batch_size=12)
    dropout = nn.Identity() if FIXED else nn.Dropout(0.2)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), dropout, nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    lr_scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=40)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(2):
        model.train()
        for source, targets in train_dataloader:
            outputs = model(source)
            loss = nn.functional.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = []
        for source, targets in eval_dataloader:
            with torch.no_grad():
                outputs = model(source)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), targets))
            right.append(predictions == references)
        accelerator.print(f"epoch {epoch}: {torch.cat(right).float().mean():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
