"""torch.cuda on simulated devices, and in a process whose one accelerator stands for all that the script names."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from gpus import needs_fake_gpus, run
from simulated_programs import alone, devices
from torch import nn

from samestep.errors import UsageError
from samestep.scripts.script_state import count_ids, num_visible
from samestep.scripts.simulated.devices import own_accelerator


def test_nothing_remains_after_the_block():
    def holders():
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in {"torch", "threading"}:
                for key, value in list(vars(module).items()):
                    yield f"{name}.{key}", id(value)
                    if isinstance(value, type) and value.__module__ == name:
                        yield from ((f"{name}.{key}.{k}", id(v)) for k, v in list(vars(value).items()))

    with devices():  # imports what is imported late
        torch.ones(1).cuda()
    before, count = dict(holders()), torch.cuda.device_count()
    with devices() as script:
        torch.set_default_device("cuda")
        torch.cuda.set_device(1)
        assert torch.cuda.device_count() == 4
    after = dict(holders())
    ignored = ("__doc__", "__abstractmethods__", "_abc_impl", "CURRENT_DEVICE")
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} <= {
        name for name in after if name.endswith(ignored)
    }
    assert torch.cuda.device_count() == count
    assert torch.ones(1).device.type == "cpu"
    assert not vars(script.mark(torch.ones(1), 3))


def test_devices_are_counted_named_and_chosen():
    with devices(num_devices=3):
        assert torch.cuda.is_available()
        assert torch.accelerator.is_available()
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 3
        assert torch.accelerator.current_accelerator().type == "cuda"
        assert torch.cuda.current_device() == 0
        torch.cuda.set_device("cuda:2")
        assert torch.ones(1).cuda().get_device() == torch.accelerator.current_device_index() == 2
        with torch.cuda.device(1):
            assert torch.ones(1, device="cuda").get_device() == 1
            with torch.cuda.device_of(torch.ones(1).cuda(0)), torch.cuda.device(None):
                assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 2
        properties = torch.cuda.get_device_properties(0)
        assert properties.total_memory > 0
        assert properties.name == torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:1")
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
        assert torch.backends.cuda.is_built()
        assert torch.backends.cudnn.is_available()


def test_what_waits_returns_and_what_measures_measures():
    with devices():
        stream = torch.cuda.Stream(device=1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.cuda.stream(stream):
            x = torch.ones(3).pin_memory().to(0, non_blocking=True)
            x.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(stream)
        end.record(stream)
        torch.cuda.synchronize()
        end.synchronize()
        assert start.elapsed_time(end) >= 0
        assert (stream.query(), end.query(), stream.device) == (True, True, torch.device("cuda:1"))
        assert isinstance(stream, torch.cuda.Stream)
        assert isinstance(stream, torch.Stream)
        with pytest.raises(ValueError, match="enable_timing"):
            torch.cuda.Event().elapsed_time(end)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated(0) == 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()
        torch.accelerator.synchronize()


def test_the_seeds_of_devices_are_those_of_the_cpu():
    with devices():
        torch.cuda.manual_seed_all(7)
        first = torch.rand(3, device="cuda")
        torch.manual_seed(7)
        assert torch.rand(3, device="cuda").equal(first)
        state = torch.cuda.get_rng_state()
        second = torch.rand(2)
        torch.cuda.set_rng_state(state)
        assert torch.rand(2).equal(second)
        assert len(torch.cuda.get_rng_state_all()) == 4
        torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
        with torch.random.fork_rng(devices=[0, 1]):
            torch.manual_seed(7)
            inside = torch.rand(1)
        assert not torch.rand(1).equal(inside)
        assert torch.cuda.initial_seed() == 7


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("torch.cuda.CUDAGraph", lambda: torch.cuda.CUDAGraph()),
        ("torch.cuda.graph", lambda: torch.cuda.graph(None)),
        ("torch.cuda.cudart", lambda: torch.cuda.cudart()),
        ("torch.cuda.utilization", lambda: torch.cuda.utilization()),
        ("torch.cuda.nccl.unique_id", lambda: torch.cuda.nccl.unique_id()),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(name, call):
    with devices(), pytest.raises(UsageError, match=name.replace(".", r"\.")):
        call()


def test_every_public_function_of_torch_cuda_is_known_or_refused():
    originals = {name: getattr(torch.cuda, name) for name in torch.cuda.__all__}
    with devices():
        same = {name for name, value in originals.items() if getattr(torch.cuda, name) is value and callable(value)}
    assert {name for name in same if not name.endswith("Storage")} == {
        *("CudaError", "DeferredCudaCallError", "cudaStatus", "is_initialized")
    }


@pytest.mark.parametrize(
    ("ids", "count"),
    [("0,4", 2), ("", 0), ("-1", 0), ("0,-1,2", 1), ("0, 1,x,2", 2), ("0,0", 0), ("GPU-8932f937,GPU-a", 2), ("5", 1)],
)
def test_a_list_of_ids_counts_as_in_cuda(ids, count):
    assert count_ids(ids) == count


def test_only_ids_that_the_script_assigned_change_the_count(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with devices(num_devices=3) as script:
        assert num_visible(script) == torch.cuda.device_count() == 3
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,4"
        assert num_visible(script) == torch.cuda.device_count() == 2
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        assert not torch.cuda.is_available()
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            torch.ones(1).cuda()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        assert torch.cuda.device_count() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,4")
    assert num_visible(alone(num_devices=3, num_microbatches=5)) == 5


def test_factories_and_moves_go_to_the_own_device():
    # "meta" plays the accelerator: it is the one other device that every machine has
    own = torch.device("meta")
    with own_accelerator(lambda: 3, own):
        assert torch.ones(1, device="meta:2").device == own
        assert torch.ones(1).to("meta:1").device == torch.ones(1).to(2).device == own
        assert nn.Linear(1, 1).to("meta:2").weight.device == own
        assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).to("cpu", torch.float64).dtype == torch.float64
        assert torch.accelerator.device_count() == 3
        torch.accelerator.set_device_index(2)
        with torch.device("meta:1"):
            assert torch.ones(1).device == own
        torch.set_default_device("meta:2")
        assert torch.ones(1).device == torch.get_default_device() == own
        torch.set_default_device(None)
        assert isinstance(torch.default_generator, torch.Generator)
        for asked in ("meta:64", -1, 64):
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                torch.ones(1, device=asked)
        file = io.BytesIO()
        torch.save({"x": torch.ones(2)}, file)
        file.seek(0)
        assert torch.load(file)["x"].tolist() == [1, 1]
    assert torch.accelerator.device_count() != 3


SCRIPT = """
    import sys
    import torch
    sys.path.insert(0, sys.argv[1])
    from simulated_programs import alone
    from samestep.scripts.simulated.devices import own_accelerator

    with own_accelerator(lambda: 4, torch.device("cuda:0")):
        assert torch.cuda.device_count() == 4
        generator = torch.Generator(device="cuda:3").manual_seed(5)
        assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
        drawn = torch.rand(3, device="cuda:3", generator=generator)
        assert torch.equal(torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(5)), drawn)
        torch.set_default_device("cuda:2")
        model = torch.nn.Linear(2, 2)
        print(drawn.device, generator.device, model.weight.device, torch.Generator().device)
        torch.cuda.set_device(3)
        with torch.device("cuda:1"), torch.cuda.device(2):
            torch.cuda.manual_seed_all(3)
            x = torch.randn(4, 2).to("cuda:1")
            torch.cuda.synchronize("cuda:3")
            state = torch.cuda.get_rng_state("cuda:2")
            torch.cuda.set_rng_state(state, 1)
        print(model(x.cuda(2)).device, torch.cuda.get_device_name(3), torch.cuda.memory_allocated("cuda:3") > 0)
"""


@needs_fake_gpus
def test_a_script_that_names_four_gpus_runs_in_a_process_with_one():
    out = run(SCRIPT, Path(__file__).parent, devices=1)
    assert out.splitlines() == ["cuda:0 cuda:0 cuda:0 cpu", "cuda:0 Fake GPU True"]
