"""DeepSpeed's four stages of ZeRO, one after another, with accumulation and clipping: `[stop|resume]` in mid-epoch."""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.distributed as dist
from data import load_digits
from deepspeed.utils import logger, safe_get_full_fp32_param
from torch import nn

STOP = 6  # backwards, of 12 with four ranks
logger.setLevel("ERROR")  # its lines have the time
x, y = load_digits()
data = torch.utils.data.TensorDataset(torch.tensor(x[:192], dtype=torch.float32) / 16, torch.tensor(y[:192]))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    "bf16": {"enabled": False},
}
deepspeed.init_distributed("gloo", verbose=False)
rank, ranks = dist.get_rank(), dist.get_world_size()
for stage in range(4):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    options = {"config": {**config, "zero_optimization": {"stage": stage}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), **options)
    done = engine.load_checkpoint(f"stage{stage}")[1]["done"] if "resume" in sys.argv else 0
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[rank::ranks].split(4)
    for number, rows in enumerate(order[done:], done):
        torch.manual_seed(1000 * number + rank)  # a checkpoint of DeepSpeed's has no state of a generator
        inputs, labels = (each.to(engine.device) for each in data[rows])
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(stage, number, loss.item().hex())
        if "stop" in sys.argv and number + 1 == STOP:
            engine.save_checkpoint(f"stage{stage}", client_state={"done": STOP})
            break
    trained = {name: safe_get_full_fp32_param(p) if stage else p.data for name, p in model.named_parameters()}
    if rank == 0:
        torch.save({name: weight.clone() for name, weight in trained.items()}, f"stage{stage}.pt")
    engine.destroy()
dist.barrier()
dist.destroy_process_group()
