"""A process with one accelerator maps all that the script names to it."""

import io

import pytest
import torch
from torch import nn
from virtual_programs import alone

from samestep.scripts.virtual.real import mapped_device, own_accelerator

OWN = torch.device("cuda", 0)


@pytest.mark.parametrize("asked", [0, 3, "cuda", "cuda:3", torch.device("cuda:2")])
def test_every_accelerator_of_the_script_is_the_own_one(asked):
    assert mapped_device(asked, OWN) == OWN


@pytest.mark.parametrize("asked", ["cpu", torch.device("meta"), None, torch.float32, True])
def test_other_arguments_stay(asked):
    assert mapped_device(asked, OWN) is asked


@pytest.mark.parametrize("asked", [64, -1, "cuda:64"])
def test_an_accelerator_that_cannot_be_is_an_error(asked):
    with pytest.raises(RuntimeError, match=r"invalid device ordinal: cuda:.*"):
        mapped_device(asked, OWN)


def test_factories_and_moves_go_to_the_own_device():
    # "meta" plays the accelerator: it is the one other device that every machine has
    own = torch.device("meta")
    with own_accelerator(alone(num_devices=3), own):
        assert torch.ones(1, device="meta:2").device == own
        assert torch.ones(1).to("meta:1").device == torch.ones(1).to(2).device == own
        assert nn.Linear(1, 1).to("meta:2").weight.device == own
        assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).to("cpu", torch.float64).dtype == torch.float64
        assert torch.accelerator.device_count() == 3
        torch.accelerator.set_device_index(2)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="meta:64")
        file = io.BytesIO()
        torch.save({"x": torch.ones(2)}, file)
        file.seek(0)
        assert torch.load(file)["x"].tolist() == [1, 1]
    assert torch.accelerator.device_count() != 3
