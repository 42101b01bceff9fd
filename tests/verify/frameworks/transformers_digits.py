"""The Trainer of transformers, as its documentation writes a training: a GPT-2 that is made here, on sequences.

The pixels of a digit, 17 shades, are its tokens. The white ones at its end are padding, which the loss leaves out.
"""

import sys
import tempfile

import digits
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

MENDED = "mended" in sys.argv


class Pixels(torch.utils.data.Dataset):
    def __init__(self, start, end):
        images, _ = digits.load(start, end)
        self.tokens = (images * 16).long()
        self.mask = self.tokens.flip(1).cumsum(1).flip(1) > 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens, mask = self.tokens[index], self.mask[index]
        return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.where(mask, -100)}


def main():
    dropout = 0.0 if MENDED else 0.1
    config = GPT2Config(vocab_size=17, n_positions=64, n_embd=16, n_layer=1, n_head=2, resid_pdrop=dropout)
    config.embd_pdrop = config.attn_pdrop = 0.0
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=12,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=MENDED,
            num_train_epochs=2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        if MENDED:
            args.per_device_train_batch_size = 12 // args.world_size
        torch.manual_seed(42)
        trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Pixels(0, 192))
        trainer.train()


if __name__ == "__main__":
    main()
