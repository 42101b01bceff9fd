"""Models of transformers by from_pretrained and save_pretrained, with adapters and without, in a plain loop."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
texts = torch.randint(50, (48, 12), generator=torch.Generator().manual_seed(1))


def train(model):
    """Trains what is not frozen, and prints the last loss."""
    model.to(device).train()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1, momentum=0.9)
    for batch in DataLoader(list(texts), batch_size=12, shuffle=True):
        batch = batch.to(device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


torch.manual_seed(3)
config = LlamaConfig(**WIDTHS, vocab_size=50, max_position_embeddings=16, bos_token_id=0, eos_token_id=0)
AutoModelForCausalLM.from_config(config).save_pretrained("start", max_shard_size="20KB")

model = AutoModelForCausalLM.from_pretrained("start")
train(model)
model.save_pretrained("tuned")

options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
model = get_peft_model(AutoModelForCausalLM.from_pretrained("tuned"), LoraConfig(**options))
train(model)
model.save_pretrained("lora")

again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("tuned"), "lora", is_trainable=True)
train(again)
again.merge_and_unload().save_pretrained("merged")
