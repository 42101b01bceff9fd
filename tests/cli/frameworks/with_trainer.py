"""The Trainer of transformers: a small BERT reads scanned digits as sentences of pixels."""

import numpy as np
from data import load_digits
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(7)
pixels, labels = load_digits()
rows = [
    {"input_ids": picture.astype(int).tolist(), "label": int(label)}
    for picture, label in zip(pixels[:150], labels[:150], strict=True)
]


def accuracy(found):
    return {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))}


config = BertConfig(
    vocab_size=17, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=10
)
arguments = TrainingArguments(
    output_dir="trained",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=0.002,
    warmup_steps=2,
    logging_steps=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    label_smoothing_factor=0.1,
    report_to=[],
    disable_tqdm=True,
    seed=7,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=Dataset.from_list(rows[:110]),
    eval_dataset=Dataset.from_list(rows[110:]),
    compute_metrics=accuracy,
)
trainer.train()
trainer.save_model("model")
if trainer.is_world_process_zero():
    print(arguments.world_size, "processes", [entry.get("loss") for entry in trainer.state.log_history])
