"""Models of transformers by from_pretrained and save_pretrained, in loops of one's own. Its arguments say which."""

import json
import os
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, set_seed

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
CONFIGS = {
    "gpt2": GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0),
    "llama": LlamaConfig(**WIDTHS, vocab_size=50, max_position_embeddings=16, bos_token_id=0, eos_token_id=0),
}
TEXTS = torch.randint(50, (48, 12), generator=torch.Generator().manual_seed(1))


def downloaded(name):
    """A model by `from_pretrained`, of a folder that rank 0 writes, in files with an index, if there is none."""
    if rank == 0 and not os.path.exists(name):
        set_seed(3)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(name, max_shard_size="20KB")
    dist.barrier()
    set_seed(7 + rank + 4 * leaked)  # dropout of its own on each rank
    return AutoModelForCausalLM.from_pretrained(name)


def trained(model, optimizer, loader=None, backward=torch.Tensor.backward):
    """Trains on whole batches of four, and prints the last losses of all ranks."""
    model.train()
    data = list(TEXTS)
    if loader is None:
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    for texts in loader:
        loss = model(input_ids=texts.to(device), labels=texts.to(device)).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses = [None] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    if rank == 0:
        print(losses, flush=True)


def sgd(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1, momentum=0.9)


def ddp(saved="ddp"):
    model = DistributedDataParallel(downloaded("gpt2").to(device))
    trained(model, sgd(model))
    if rank == 0:
        model.module.save_pretrained(saved)


def leak():
    """A twin: the device on which a rank really runs gets into its seed."""
    global leaked
    leaked = json.loads(os.environ["SAMESTEP_WORKER"])["device_index"]
    ddp("leaked")


def lora():
    """Adapters are trained and saved, read again by all ranks, and merged by rank 0."""
    options = {"r": 2, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = DistributedDataParallel(get_peft_model(downloaded("llama"), LoraConfig(**options)).to(device))
    trained(model, sgd(model))
    if rank == 0:
        model.module.save_pretrained("lora")
    dist.barrier()
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("llama"), "lora", is_trainable=True)
    again = DistributedDataParallel(again.to(device))
    trained(again, sgd(again))
    if rank == 0:
        again.module.merge_and_unload().save_pretrained("merged")


def fsdp():
    model = downloaded("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    trained(model, sgd(model))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained("fsdp", state_dict=whole)


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = downloaded("llama")
    loader = DataLoader(list(TEXTS), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    trained(model, optimizer, loader, accelerator.backward)
    accelerator.wait_for_everyone()
    options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    accelerator.unwrap_model(model).save_pretrained("accelerate", **options)


leaked = 0
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
for variant in sys.argv[1:]:
    globals()[variant]()
dist.destroy_process_group()
