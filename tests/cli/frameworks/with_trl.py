"""TRL's SFTTrainer: a small Llama with a tokenizer of its own learns the descriptions of scikit-learn's data sets."""

from data import load_texts
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(7)
paragraphs = [part for text in load_texts() for part in text.split("\n\n") if len(part) > 40]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.train_from_iterator(
    paragraphs, trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "</s>"], show_progress=False)
)
processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(processing),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
)
arguments = SFTConfig(
    output_dir="trained",
    max_length=48,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=0.005,
    max_steps=6,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    bf16=False,
    seed=7,
)
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_dict({"text": paragraphs}), processing_class=processing
)
trainer.train()
trainer.save_model("model")
if trainer.is_world_process_zero():
    print(arguments.world_size, "processes", [entry.get("loss") for entry in trainer.state.log_history])
