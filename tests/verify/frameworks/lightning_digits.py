"""Lightning's Trainer with strategy="ddp", as its documentation writes a LightningModule."""

import os
import sys

import digits
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv
NUM_DEVICES = int(os.environ.get("WORLD_SIZE", "1"))


class LitDigits(L.LightningModule):
    def __init__(self):
        super().__init__()
        norm = nn.LayerNorm(32) if FIXED else nn.BatchNorm1d(32)  # sync_batchnorm=True is for GPUs
        self.net = nn.Sequential(nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


def main():
    L.seed_everything(42, workers=True)
    batch_size = 24 // NUM_DEVICES if FIXED else 24
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=NUM_DEVICES,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train_loader = DataLoader(TensorDataset(*digits.load(0, 192)), batch_size=batch_size, shuffle=True)
    trainer.fit(LitDigits(), train_loader, DataLoader(TensorDataset(*digits.load(192, 240)), batch_size=24))


if __name__ == "__main__":
    main()
