"""Tensors on simulated devices say where they are, move as on a GPU, and leave no trace in files."""

import copy
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from simulated_programs import devices
from torch import nn


@pytest.fixture(autouse=True)
def script():
    with devices() as script:
        yield script


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda:1"),
        lambda: torch.tensor([1.0, 2.0], device="cuda:1"),
        lambda: torch.as_tensor(np.ones(2), device="cuda:1"),
        lambda: torch.ones(2).cuda(1),
        lambda: torch.ones(2).cuda(device="cuda:1", non_blocking=True),
        lambda: torch.ones(2).to(1),
        lambda: torch.ones(2).to("cuda:1", torch.float64, True),
        lambda: torch.ones(2).to(torch.zeros(1, device="cuda:1")),
        lambda: torch.ones(2).type_as(torch.zeros(1, device="cuda:1")),
        lambda: torch.randn(2, generator=torch.Generator("cuda:1"), device="cuda:1"),
        lambda: torch.ones(2).new_zeros(2, device="cuda:1"),
        lambda: nn.Linear(1, 2).to(1).bias,
        lambda: nn.Linear(1, 2).cuda(1).bias,
        lambda: nn.LazyLinear(2).cuda(1)(torch.ones(1, 1).cuda(1))[0],
        lambda: nn.Parameter(torch.ones(2, device="cuda:1")),
        lambda: copy.deepcopy(nn.Linear(1, 2).cuda(1)).bias,
    ],
)
def test_every_way_to_put_a_tensor_on_a_device_puts_it_there(make):
    made = make()
    assert made.device == torch.device("cuda:1")
    assert str(made.device) == "cuda:1"
    assert made.is_cuda
    assert not made.is_cpu
    assert made.get_device() == 1
    assert "device='cuda:1'" in repr(made)
    assert "device='cuda:1'" in f"{made}"
    assert made.type().startswith("torch.cuda.")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x + 1,
        lambda x: torch.ones(2) + x,
        lambda x: x[0],
        lambda x: x.data,
        lambda x: x.clone().half(),
        lambda x: x.max(dim=0).values,
        lambda x: torch.cat([x, x]),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_tensor([1.0]),
        lambda x: nn.LSTM(2, 3).cuda(1)(x)[1][0],
        lambda x: torch.tensor(x.sum()),
        lambda x: x.add_(torch.ones(2)),
        lambda x: torch.ops.aten.neg(x),
        lambda x: torch._foreach_add([x], 1)[0],
    ],
)
def test_results_are_where_their_arguments_are(make):
    assert make(torch.ones(2, 2, device="cuda:1")).device == torch.device("cuda:1")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.ones(2),
        lambda x: x.cpu(),
        lambda x: x.to(torch.ones(1)),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: torch.ones(2).copy_(x[0]),
        lambda x: torch.zeros_like(x, device="cpu"),
        lambda x: torch.add(x, 1, out=torch.ones(2, 2)),
        lambda x: torch.tensor([x.sum(), x.sum()]),
        lambda x: torch.from_numpy(np.ones(2)),
    ],
)
def test_results_on_the_host_say_so(make):
    made = make(torch.ones(2, 2, device="cuda:1"))
    assert made.device.type == "cpu"
    assert not made.is_cuda
    assert made.get_device() == -1
    assert made.numpy() is not None


def test_a_move_copies_and_staying_does_not():
    host = torch.ones(3)
    device = host.cuda()
    host.zero_()
    assert device.tolist() == [1, 1, 1]
    assert device.cuda() is device
    assert device.to("cuda:0") is device
    assert device.cpu().data_ptr() != device.data_ptr()
    assert device.to("cuda:1").data_ptr() != device.data_ptr()
    assert device.to("cuda:0", copy=True) is not device
    assert host.cpu() is host
    array = np.ones(2)
    torch.as_tensor(array, device="cuda").zero_()
    assert array.tolist() == [1, 1]


def test_gradients_pass_through_moves():
    host = torch.ones(3, requires_grad=True)
    moved = host.cuda() * 2
    (moved.cpu() * torch.arange(3.0)).sum().backward()
    assert host.grad.tolist() == [0, 2, 4]
    assert host.grad.device.type == "cpu"
    leaf = torch.ones(3, device="cuda:1", requires_grad=True)
    leaf.square().sum().backward()
    assert leaf.grad.device == torch.device("cuda:1")
    (gradient,) = torch.autograd.grad(leaf.square().sum(), [leaf])
    assert gradient.device == torch.device("cuda:1")


def test_hooks_and_custom_functions_see_the_device_in_backward():
    seen = []

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient.device)
            return torch.zeros(2, device="cuda:1") - gradient

    x = torch.ones(2, device="cuda:1", requires_grad=True)
    y = Reverse.apply(x)
    assert y.device == x.device
    y.register_hook(lambda gradient: seen.append(gradient.cpu().numpy().tolist()))
    y.sum().backward()
    assert seen == [[1, 1], torch.device("cuda:1")]
    assert x.grad.tolist() == [-1, -1]


def test_a_tensor_on_a_device_does_not_become_an_array():
    x = torch.ones(2, device="cuda:1")
    for convert in (x.numpy, lambda: np.asarray(x), lambda: np.array([x.sum(), x.sum()])):
        with pytest.raises(TypeError, match=r"can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu\(\)"):
            convert()
    assert x.cpu().numpy().tolist() == [1, 1]
    assert x.numpy(force=True).tolist() == [1, 1]
    assert (x.sum().item(), float(x.sum()), f"{x.sum():.1f}", len(x), bool(x[0])) == (2, 2, "2.0", 2, True)


def test_data_takes_its_device_along():
    module = nn.Linear(2, 2)
    before = module.weight
    module.cuda(1)
    assert module.weight is before
    assert before.device == torch.device("cuda:1")
    before.data = before.data.cpu()
    assert before.device.type == "cpu"


def test_packed_sequences_keep_their_lengths_on_the_host():
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 1).cuda(), torch.tensor([3, 2]))
    assert packed.data.is_cuda
    assert packed.batch_sizes.device.type == "cpu"
    padded, lengths = nn.utils.rnn.pad_packed_sequence(nn.LSTM(1, 2).cuda()(packed)[0])
    assert padded.is_cuda
    assert lengths.numpy().tolist() == [3, 2]
    assert packed.to("cpu").data.device.type == "cpu"


def test_a_device_that_is_not_there_is_an_error():
    for ask in (
        lambda: torch.ones(1).cuda(64),
        lambda: torch.ones(1, device="cuda:99"),
        lambda: torch.cuda.set_device(64),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            ask()
    assert torch.ones(1, device="meta").device.type == "meta"
    assert torch.zeros_like(torch.ones(1).cuda(), device="meta").device.type == "meta"
    assert nn.Linear(1, 1, device="meta").to_empty(device="cuda").weight.is_cuda


def test_default_devices_are_followed():
    with torch.device("cuda:1"):
        assert nn.Linear(1, 1).weight.device == torch.ones(1).device == torch.device("cuda:1")
        assert torch.ones(1, device="cpu").device.type == "cpu"
        assert torch.ones(1).cpu().numpy().tolist() == [1]
    torch.set_default_device("cuda:1")
    assert torch.get_default_device() == torch.ones(1).device == torch.tensor(1.0).device == torch.device("cuda:1")
    torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.rand(1).is_cuda
    torch.set_default_tensor_type("torch.FloatTensor")
    assert not torch.rand(1).is_cuda


def test_the_old_tensor_types_work():
    made = torch.cuda.FloatTensor([1, 2])
    assert made.is_cuda
    assert made.dtype == torch.float32
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made.cpu(), torch.cuda.FloatTensor)
    assert not isinstance(made, torch.cuda.LongTensor)
    assert made.type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).type(torch.cuda.LongTensor).is_cuda
    assert torch.ones(2).type("torch.cuda.LongTensor").dtype == torch.int64
    assert made.type(torch.FloatTensor).type() == "torch.FloatTensor"


def test_generators_know_their_device_and_draw():
    generator = torch.Generator(device="cuda:1").manual_seed(3)
    assert generator.device == torch.device("cuda:1")
    same = torch.Generator().manual_seed(3)
    assert torch.rand(3, device="cuda:1", generator=generator).tolist() == torch.rand(3, generator=same).tolist()
    assert isinstance(same, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)


def test_files_and_pickles_hold_plain_tensors():
    state = {"x": torch.ones(2).cuda(1), "p": nn.Linear(1, 1).cuda().weight, "host": torch.ones(1)}
    file = io.BytesIO()
    torch.save(state, file)
    content = file.getvalue() + pickle.dumps(state)
    assert b"samestep" not in content
    assert b"cuda" not in content
    for location in (None, "cpu", {"cuda:1": "cpu"}, lambda storage, place: storage):
        file.seek(0)
        assert torch.load(file, map_location=location)["x"].device.type == "cpu"
    for location in ("cuda:2", torch.device("cuda:2"), {"cpu": "cuda:2"}, lambda storage, place: storage.cuda(2)):
        for weights_only in (True, False):
            file.seek(0)
            read = torch.load(file, map_location=location, weights_only=weights_only)
            assert {value.device for value in read.values()} == {torch.device("cuda:2")}
    assert pickle.loads(pickle.dumps(state["p"])).tolist() == state["p"].tolist()


def test_whole_modules_are_saved_and_loaded():
    module, file = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).cuda(), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    read = torch.load(file, map_location="cuda:3", weights_only=False)
    assert {value.device for value in read.state_dict().values()} == {torch.device("cuda:3")}
    module.load_state_dict(read.state_dict())
    assert module[0].weight.device == torch.device("cuda:0")


def test_threads_of_the_script_see_the_devices():
    class Worker(threading.Thread):
        def run(self):
            self.device = torch.ones(1).cuda(1).device
            self.current = torch.cuda.current_device()

    seen = []
    torch.cuda.set_device(2)
    threads = [Worker(), threading.Thread(target=lambda: seen.append(torch.ones(1, device="cuda:1").device))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [threads[0].device] == [torch.device("cuda:1")]
    assert threads[0].current == 0
