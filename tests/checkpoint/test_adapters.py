"""Adapters of peft: trained beside a frozen model alike on any devices, saved, and gone on from."""

from functools import partial

import pytest
import torch
from hub_programs import STRATEGIES, TOKENS, config, needs_transformers, net_class, next_token
from safetensors.torch import load_model, save_model
from worlds import alone, in_turns

from samestep.checkpoint.digest import state_digest
from samestep.run.run import Run
from samestep.run.trainer import Trainer

pytestmark = needs_transformers


def adapted():
    """A frozen net with adapters, whose second matrices are not zero, so that both are trained from the first step."""
    import peft

    torch.manual_seed(0)
    adapters = peft.LoraConfig(
        r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    return peft.get_peft_model(net_class()(config()), adapters)


def tune(communicator, strategy, folder=None, source=None):
    """The digest after an epoch; from saved weights, if they are given."""
    run = Run(8, 4, 0, communicator=communicator)
    model = adapted()
    if source is not None:
        load_model(model, source)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    options = {"strategy": STRATEGIES[strategy], "run_dir": folder, "checkpoint_minutes": None}
    loss = partial(next_token, call=lambda model, batch: model(input_ids=batch))
    with Trainer(run, model, optimizer, loss, **options) as trainer:
        trainer.fit(TOKENS, epochs=1)
        return trainer.digest


def check(run, strategy, folder):
    import peft

    assert set(run(tune, strategy, folder / "run")) == {alone(tune, "replicate")}
    whole, fresh = adapted(), adapted()
    load_model(whole, folder / "run" / "weights.safetensors")
    frozen = {name: p for name, p in fresh.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, dict(whole.named_parameters())[name]) for name, p in frozen.items())
    whole.save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(fresh.unload(), folder / "adapter", is_trainable=True)
    assert state_digest(again, []) == state_digest(whole, []) != state_digest(adapted(), [])
    save_model(again, str(folder / "again.safetensors"))
    sources = folder / "run" / "weights.safetensors", folder / "again.safetensors"
    on = [set(run(tune, strategy, None, source)) for source in sources]
    assert on[0] == on[1] == {alone(tune, "replicate", None, sources[0])}


@pytest.mark.parametrize(("strategy", "world_size"), [("replicate", 2), ("zero1", 3)])
def test_adapters_end_in_the_same_bits_and_are_saved_and_gone_on_from(tmp_path, strategy, world_size):
    check(partial(in_turns, world_size), strategy, tmp_path)


def test_adapters_of_a_sharded_model_end_in_the_same_bits_too(worlds, tmp_path):
    check(worlds(2).run, "sharded", tmp_path)
