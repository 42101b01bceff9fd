"""A small model of transformers, made from its configuration, and its training under each strategy.

The import of transformers takes seconds, in each process that collects the tests: it is left to those that use it.
"""

import pytest
import torch
from torch.nn import functional

from samestep.engine.losses import Mean
from samestep.engine.strategy_options import Sharded
from samestep.extras import is_installed
from samestep.run.run import Run
from samestep.run.trainer import Trainer

NEEDED = "transformers", "peft"
needs_transformers = pytest.mark.skipif(
    not all(map(is_installed, NEEDED)), reason=f"not all are installed of {NEEDED} (the extra frameworks)"
)
STRATEGIES = {"replicate": "replicate", "zero1": "zero1", "sharded": Sharded()}
TOKENS = torch.randint(16, (24, 6), generator=torch.Generator().manual_seed(0))


def net_class():
    """The class of the nets."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel


def config():
    """The configuration of a small net."""
    from transformers import GPT2Config

    return GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)


def next_token(model, batch, call=lambda model, tokens: model(tokens)):
    scores = call(model, batch)
    scores = getattr(scores, "logits", scores)[:, :-1]
    targets = batch[:, 1:]
    return Mean(functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def finetune(communicator, strategy, folder, source=None):
    """The digest after two epochs, and the weights of one device; from a folder or weights, if these are given."""
    run = Run(8, 4, 0, communicator=communicator)
    torch.manual_seed(0)
    model = net_class()(config())
    if isinstance(source, dict):
        model.load_state_dict(source)
    elif source is not None:
        model = net_class().from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"strategy": STRATEGIES[strategy], "run_dir": folder, "checkpoint_minutes": None}
    with Trainer(run, model, optimizer, next_token, max_grad_norm=1.0, **options) as trainer:
        trainer.fit(TOKENS, epochs=2)
        digest = trainer.digest
    whole = communicator.world_size == 1
    return digest, {name: t.detach().clone() for name, t in model.state_dict().items()} if whole else None
