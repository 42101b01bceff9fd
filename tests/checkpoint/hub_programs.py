"""Small models of transformers, made from their configuration, and their training under each strategy."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep.engine.losses import Mean
from samestep.engine.strategy_options import Sharded
from samestep.run.run import Run
from samestep.run.trainer import Trainer

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra frameworks)")

STRATEGIES = {"replicate": "replicate", "zero1": "zero1", "sharded": Sharded()}
TOKENS = torch.randint(16, (24, 6), generator=torch.Generator().manual_seed(0))


class StagedConfig(transformers.PreTrainedConfig):
    model_type = "staged"


class Staged(transformers.PreTrainedModel):
    """A model of transformers whose layers follow each other."""

    config_class = StagedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 16))
        self.post_init()

    def forward(self, input_ids):
        return self.layers(input_ids)


NETS = {"gpt2": transformers.GPT2LMHeadModel, "staged": Staged}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    ),
    "staged": StagedConfig,
}


def next_token(model, batch, call=lambda model, tokens: model(tokens)):
    scores = call(model, batch)
    scores = getattr(scores, "logits", scores)[:, :-1]
    targets = batch[:, 1:]
    return Mean(functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def finetune(communicator, net, strategy, folder, source=None):
    """The digest after two epochs, and the weights of one device; from a folder or weights, if these are given."""
    run = Run(8, 4, 0, communicator=communicator)
    torch.manual_seed(0)
    model = NETS[net](CONFIGS[net]())
    if isinstance(source, dict):
        model.load_state_dict(source)
    elif source is not None:
        model = NETS[net].from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"strategy": STRATEGIES[strategy], "run_dir": folder, "checkpoint_minutes": None}
    with Trainer(run, model, optimizer, next_token, max_grad_norm=1.0, **options) as trainer:
        trainer.fit(TOKENS, epochs=2)
        digest = trainer.digest
    whole = communicator.world_size == 1
    return digest, {name: t.detach().clone() for name, t in model.state_dict().items()} if whole else None
