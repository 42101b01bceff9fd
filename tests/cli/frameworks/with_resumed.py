"""A small net trained by a framework: `NAME [stop|resume] [careless]`, stopped or resumed in the second epoch."""

import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STOP, EPOCHS, BATCH = 17, 2, 4  # steps, of 12 an epoch with two ranks
name, *modes = sys.argv[1:]
stops, resumes, is_careless = (mode in modes for mode in ("stop", "resume", "careless"))
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def digest(model):
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def net(dropout=0.5):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(3, device_specific=True)
    own = net()
    # A loader without a generator of its own begins with a draw from the one that dropout draws from, resumed or not.
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=None if is_careless else torch.Generator())
    model, optimizer, loader = accelerator.prepare(own, torch.optim.Adam(own.parameters(), lr=0.01), loader)
    if resumes:
        accelerator.load_state("state")
    step = STOP if resumes else 0
    while step < EPOCHS * len(loader):
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for inputs, classes in accelerator.skip_first_batches(loader, done) if done else loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), classes))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if stops and step == STOP:
                accelerator.save_state("state")
                step = EPOCHS * len(loader)
                break
    accelerator.print(digest(own))
    accelerator.end_training()


def transformers():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Stop(TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            if stops and state.global_step == STOP:
                control.should_save = control.should_training_stop = True

    def collate(rows):
        ids = torch.stack(rows)
        noise = torch.rand(ids.shape) if is_careless else torch.ones(ids.shape)  # drawn a batch ahead of its step
        return {"input_ids": torch.where(noise < 0.2, 0, ids), "labels": ids}

    set_seed(0)
    options = {"per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "save_strategy": "no"}
    options |= {"report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    rows = [*torch.randint(48, (96, 12), generator=torch.Generator().manual_seed(0))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=12, n_embd=16, n_layer=1, n_head=2))
    parts = {"train_dataset": rows, "data_collator": collate, "callbacks": [Stop()]}
    trainer = Trainer(model, TrainingArguments("state", **options), **parts)
    trainer.train(resume_from_checkpoint=resumes)
    if trainer.is_world_process_zero():
        print(digest(model))


def lightning():
    import lightning as L
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net(dropout=0.0)

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

        def train_dataloader(self):
            return StatefulDataLoader(data, batch_size=BATCH, shuffle=True)

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if stops and trainer.global_step == STOP:
                trainer.save_checkpoint("state.ckpt")
                trainer.should_stop = True

    L.seed_everything(7)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "callbacks": [Stop()]}
    trainer = L.Trainer(accelerator="auto", devices=2, strategy="ddp", max_epochs=EPOCHS, **options)
    module = Module()
    trainer.fit(module, ckpt_path="state.ckpt" if resumes else None)
    trainer.print(digest(module))


{"accelerate": accelerate, "transformers": transformers, "lightning": lightning}[name]()
