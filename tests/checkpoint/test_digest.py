"""The digest changes with whatever the state is made of, and with nothing else."""

import hashlib

import pytest
import torch
from state_changes import CHANGES, trained
from torch import nn
from train_programs import fit
from worlds import in_turns

from samestep.checkpoint.digest import state_digest


def test_equal_states_have_equal_digests():
    assert state_digest(*trained()) == state_digest(*trained())
    assert len(state_digest(*trained())) == 64


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_change_of_the_state_changes_the_digest(change):
    model, optimizer = trained()
    model[1].running_mean.zero_()
    before = state_digest(model, optimizer)
    change(model, optimizer)
    assert state_digest(model, optimizer) != before


def test_the_layout_in_memory_does_not_count():
    model, optimizer = trained()
    before = state_digest(model, optimizer)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert not model[0].weight.is_contiguous()
    assert state_digest(model, optimizer) == before


def test_gradients_modes_and_settings_do_not_count():
    model, optimizer = trained()
    before = state_digest(model, optimizer)
    optimizer.zero_grad()
    model.eval()
    optimizer.param_groups[0]["lr"] = 7
    assert state_digest(model, [optimizer]) == before


def test_every_dtype_and_an_empty_tensor_can_be_hashed():
    model = nn.Module()
    for number, dtype in enumerate([torch.bool, torch.bfloat16, torch.float16, torch.complex64, torch.uint8]):
        model.register_buffer(f"b{number}", torch.ones(3, dtype=dtype))
    model.register_buffer("empty", torch.empty(0, 2))
    model.register_buffer("scalar", torch.tensor(1.0), persistent=False)
    assert len(state_digest(model, [])) == 64


def test_the_digest_is_what_its_docstring_says():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2.0)
    expected = hashlib.sha256(b"weight torch.float32 [1, 1]\n" + b"\x00\x00\x00\x40").hexdigest()
    assert state_digest(model, torch.optim.SGD(model.parameters())) == expected


def test_several_optimizers_count_by_their_number():
    model, adam = trained()
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert state_digest(model, [adam, sgd]) == state_digest(model, [adam])
    assert state_digest(model, [sgd, adam]) != state_digest(model, [adam])


def test_the_number_of_devices_does_not_count():
    digests = [result[0] for world_size in (1, 2, 3, 4) for result in in_turns(world_size, fit)]
    assert len(set(digests)) == 1
