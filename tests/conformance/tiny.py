"""Tiny models with their tokenizer, and rows of text, in place of the ones that scripts would download."""

import json
from pathlib import Path
from string import ascii_lowercase

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    set_seed,
)

WORDS = ("<pad>", "</s>", "<unk>", *ascii_lowercase)
PAIRS, ANSWERS = ("prompt", "chosen", "rejected"), ("prompt", "completion")


def write_tiny(folder: Path) -> None:
    """Writes `model` and `judge`, as by `save_pretrained`, and `pairs` and `answers`, folders of rows."""
    set_seed(0)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = dict(zip(("pad_token", "eos_token", "unk_token"), WORDS, strict=False))
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    processing.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        num_labels=1,  # a reward
    )
    for name, model in ("model", Qwen2ForCausalLM(config)), ("judge", Qwen2ForSequenceClassification(config)):
        model.save_pretrained(folder / name)
        processing.save_pretrained(folder / name)
    for name, keys in ("pairs", PAIRS), ("answers", ANSWERS):
        rows = [
            {key: ascii_lowercase[number % 9 : 11 + place] for place, key in enumerate(keys)} for number in range(16)
        ]
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
