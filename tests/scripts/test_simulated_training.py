"""Training on simulated devices: the bits of the CPU, with loaders, mixed precision and checkpointing."""

import pytest
import torch
from simulated_programs import devices
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samestep.errors import UsageError


def test_optimizer_state_is_where_the_parameters_are_and_survives_a_checkpoint():
    with devices():
        model = nn.Linear(2, 2).cuda(1)
        update = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2).cuda(1)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        update.step()
        assert update.state[model.weight]["exp_avg"].device == torch.device("cuda:1")
        other = torch.optim.Adam(nn.Linear(2, 2).cuda(2).parameters())
        other.load_state_dict(update.state_dict())
        assert next(iter(other.state.values()))["exp_avg"].device == torch.device("cuda:2")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_that_pin_memory_work(num_workers):
    data = TensorDataset(torch.arange(12.0), torch.arange(12))
    with devices():
        context = "fork" if num_workers else None
        loader = DataLoader(data, 4, pin_memory=True, num_workers=num_workers, multiprocessing_context=context)
        iterator = iter(loader)
        assert not hasattr(iterator, "_pin_memory_thread")
        batches = [(x.cuda(non_blocking=True), y.to(1)) for x, y in iterator]
        del iterator, loader
    assert torch.cat([x for x, _ in batches]).tolist() == list(range(12))
    with devices():
        assert {x.get_device() for x, _ in batches} == {0}


@pytest.mark.parametrize(("dtype", "old"), [(None, False), (torch.bfloat16, True)])
def test_mixed_precision_with_a_scaler_trains(dtype, old):
    with devices():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 13), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 10)).cuda()
        before = model[0].weight.detach().clone()
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.cuda.amp.GradScaler(128.0) if old else torch.amp.GradScaler("cuda", 128.0)
        options = {} if dtype is None else {"dtype": dtype}
        for _ in range(2):
            x, y = torch.randn(4, 1, 16, 16, device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda")
            with torch.cuda.amp.autocast(**options) if old else torch.autocast("cuda", **options):
                out = model(x)
                assert torch.is_autocast_enabled()
                assert torch.get_autocast_gpu_dtype() == out.dtype == (dtype or torch.float16)
                loss = nn.functional.cross_entropy(out, y)
            assert loss.dtype == torch.float32
            scaler.scale(loss).backward()
            scaler.unscale_(update)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(update)
            scaler.update()
        assert scaler.is_enabled()
        assert scaler.get_scale() == 128
        assert not model[0].weight.equal(before)
        assert not torch.is_autocast_enabled()


def test_scatter_and_gather_by_hand_give_real_chunks_and_gradients():
    with devices():
        x = torch.arange(10.0, requires_grad=True)
        chunks = nn.parallel.scatter(x, [0, 1, 2, 3])
        assert [len(chunk) for chunk in chunks] == [len(chunk) for chunk in torch.arange(10).chunk(4)]
        assert [chunk.get_device() for chunk in chunks] == [0, 1, 2, 3]
        joined = nn.parallel.gather([chunk * chunk.get_device() for chunk in chunks], 1)
        assert joined.get_device() == 1
        joined.sum().backward()
        assert x.grad.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
        assert nn.parallel.gather([torch.tensor(1.0).cuda(k) for k in range(2)], "cpu").tolist() == [1, 1]
        nested = nn.parallel.scatter({"x": x, "n": 3}, [0, 1])
        assert [(part["x"].get_device(), part["n"]) for part in nested] == [(0, 3), (1, 3)]
        with pytest.raises(UsageError, match=r"torch\.nn\.parallel\.comm\.broadcast is not simulated"):
            nn.parallel.comm.broadcast(torch.ones(2).cuda(), [0, 2])


def test_compiled_models_run_eagerly(capsys):
    with devices():
        model = nn.Linear(2, 2).cuda()
        assert torch.compile(model) is model
        assert torch.compile(mode="max-autotune")(model) is model
    assert "torch.compile does nothing on simulated devices" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_models_run_and_their_results_are_on_the_device():
    with devices():
        x = torch.ones(1, 2, device="cuda:1")
        traced = torch.jit.trace(nn.Linear(2, 2).cuda(1), x)
        assert traced(x).device == torch.device("cuda:1")
