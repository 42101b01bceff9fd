"""Lightning's Trainer: a module with logged sums over the ranks, metrics, accumulation, checkpoints."""

import lightning as L
import torch
from data import load_digits
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Digits(L.LightningDataModule):
    def setup(self, stage):
        x, y = load_digits()
        data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
        self.train, self.validation = torch.utils.data.random_split(data, [1400, 397])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, batch_size=32)


class Classifier(L.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
        )
        self.accuracy = MulticlassAccuracy(num_classes=10)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        scores = self.layers(x)
        self.accuracy(scores, y)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(scores, y), sync_dist=True)

    def on_train_epoch_end(self):
        every = self.all_gather(self.layers[1].running_mean.sum())
        self.print(self.current_epoch, self.trainer.world_size, every.tolist())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


if __name__ == "__main__":
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="auto",
        devices=4,
        strategy="ddp",
        max_epochs=2,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=CSVLogger("logs"),
        log_every_n_steps=2,
        callbacks=[ModelCheckpoint(dirpath="checkpoints", monitor="val_accuracy", mode="max")],
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), datamodule=Digits())
    (scores,) = trainer.validate(ckpt_path="best", datamodule=Digits(), verbose=False)
    if trainer.is_global_zero:
        print(scores)
