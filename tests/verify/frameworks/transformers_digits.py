"""The Trainer of transformers, as its documentation writes a training: a GPT-2 that is made here, on sequences.

The pixels of a digit, 17 shades, are its tokens. The white ones at its end are padding, which the loss leaves out. With
`classes` the model is a BERT that says which digit it is, whose loss takes no `num_items_in_batch`.
"""

import sys
import tempfile

import digits
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

FIXED = "fixed" in sys.argv
CLASSES = "classes" in sys.argv


class Pixels(torch.utils.data.Dataset):
    def __init__(self, start, end):
        images, self.digits = digits.load(start, end)
        self.tokens = (images * 16).long()
        self.mask = self.tokens.flip(1).cumsum(1).flip(1) > 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens, mask = self.tokens[index], self.mask[index]
        labels = self.digits[index] if CLASSES else tokens.where(mask, -100)
        return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def make_classifier(dropout):
    sizes = {"vocab_size": 17, "max_position_embeddings": 64, "hidden_size": 16, "intermediate_size": 32}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=2, num_labels=10, hidden_dropout_prob=dropout, **sizes)
    config.attention_probs_dropout_prob = 0.0
    model = BertForSequenceClassification(config)
    if FIXED:
        model.accepts_loss_kwargs = False
    return model


def main():
    dropout = 0.0 if FIXED else 0.1
    config = GPT2Config(vocab_size=17, n_positions=64, n_embd=16, n_layer=1, n_head=2, resid_pdrop=dropout)
    config.embd_pdrop = config.attn_pdrop = 0.0
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=12,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=FIXED or CLASSES,
            num_train_epochs=2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        if FIXED:
            args.per_device_train_batch_size = 12 // args.world_size
        torch.manual_seed(42)
        model = make_classifier(dropout) if CLASSES else GPT2LMHeadModel(config)
        trainer = Trainer(model=model, args=args, train_dataset=Pixels(0, 192))
        trainer.train()


if __name__ == "__main__":
    main()
