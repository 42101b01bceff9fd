"""The Trainer of transformers, as its documentation writes a fine-tuning; the model is made here, from a config."""

import sys
import tempfile

import digits
import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

MENDED = "mended" in sys.argv


class Digits(torch.utils.data.Dataset):
    def __init__(self, start, end):
        images, self.labels = digits.load(start, end)
        self.images = images.view(-1, 1, 8, 8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def main():
    dropout = 0.0 if MENDED else 0.1
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=dropout,
        num_labels=10,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=24,
            num_train_epochs=2,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        if MENDED:
            args.per_device_train_batch_size = 24 // args.world_size
        torch.manual_seed(42)
        model = ViTForImageClassification(config)
        trainer = Trainer(model=model, args=args, train_dataset=Digits(0, 192))
        trainer.train()


if __name__ == "__main__":
    main()
