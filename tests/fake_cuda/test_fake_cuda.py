"""The fake GPU itself: what is wrong on a real one is wrong on it, and shows as wrong numbers or as torch's error."""

import pytest
from gpus import needs_fake_gpus, run

pytestmark = needs_fake_gpus


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("writer", ["side", "main"])
def test_a_missing_wait_between_streams_gives_wrong_numbers(writer, waits):
    program = f"""
        import torch
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        writer, reader = (side, main) if {writer!r} == "side" else (main, side)
        big = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(writer):
            written = big * 3
        if {waits}:
            reader.wait_stream(writer)
        with torch.cuda.stream(reader):
            read = written + 1
            print(bool((read == 4).all()))
    """
    assert run(program, FAKE_CUDA_LATE_US="10000000").split() == [str(waits)]


@pytest.mark.parametrize("records", [True, False])
def test_memory_that_another_stream_reads_is_reused_unless_it_is_recorded(records):
    program = f"""
        import torch
        side = torch.cuda.Stream()
        first = torch.full((1000,), 5.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            read = first + 1
        if {records}:
            first.record_stream(side)
        pointer = first.data_ptr()
        del first
        second = torch.zeros(1000, device="cuda")
        second.sum().item()  # the default stream goes on, the other one has not begun
        side.synchronize()
        print(bool((read == 6).all()), second.data_ptr() == pointer)
    """
    assert run(program, FAKE_CUDA_LATE_US="10000000").split() == [str(records), str(not records)]


def test_events_measure_the_time_of_the_device_and_not_that_of_the_host():
    program = """
        import time
        import torch

        def seconds(work):
            first, last = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            big = torch.ones(1024, 1024, device="cuda")
            torch.cuda.synchronize()
            first.record()
            work(big)
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        start = time.perf_counter()
        products = seconds(lambda big: [big @ big for _ in range(4)])
        print(0 < products < time.perf_counter() - start, seconds(lambda _: time.sleep(0.005)) < 0.005)
    """
    assert run(program, FAKE_CUDA_LATE_US="10000000").split() == ["True", "True"]


@pytest.mark.parametrize("synchronizes", [True, False])
def test_a_copy_to_pinned_memory_arrives_late(synchronizes):
    program = f"""
        import torch
        host = torch.zeros(8, pin_memory=True)
        host.copy_(torch.arange(8, device="cuda"), non_blocking=True)
        if {synchronizes}:
            torch.cuda.synchronize()
        print(host.tolist() == list(range(8)))
    """
    assert run(program, FAKE_CUDA_LATE_US="10000000").split() == [str(synchronizes)]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_from_pinned_memory_reads_late_and_from_pageable_at_once(pinned):
    program = f"""
        import torch
        host = torch.ones(8, pin_memory={pinned})
        device = host.to("cuda", non_blocking=True)
        host.zero_()
        print(device.sum().item())
    """
    assert run(program, FAKE_CUDA_LATE_US="10000000").split() == ["0.0" if pinned else "8.0"]


def test_a_launch_holds_the_host_up_while_1024_others_are_queued():
    program = """
        import fake_cuda
        import torch
        one, other = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda:1")
        torch.cuda.synchronize(), torch.cuda.synchronize(1)
        begun = fake_cuda.counts()

        def launch(number, tensor=one):
            before, events = fake_cuda.held_up(), []
            for _ in range(number):
                tensor.add_(1)
                events.append(torch.cuda.Event())
                events[-1].record(torch.cuda.current_stream(tensor.device))
            return fake_cuda.held_up() - before, sum(event.query() for event in events)

        print(launch(1024), launch(1, other))
        print(launch(1024)[0] > 0, launch(1, other), fake_cuda.counts()[0] - begun[0])
        torch.cuda.synchronize()
        print(launch(1024), one.item())
    """
    # Nothing runs of itself, and to be held up is no wait that a program has asked for.
    assert run(program, FAKE_CUDA_LATE_US="100000000").splitlines() == [
        "(0, 0) (0, 0)",
        "True (0, 0) 0",
        "(0, 0) 3072.0",
    ]


def test_what_is_queued_is_shown_by_stream():
    program = """
        import fake_cuda
        import torch
        side = torch.cuda.Stream()
        one = torch.zeros(1, device="cuda")
        with fake_cuda.queued() as entries:
            one.add_(1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                one.mul_(2)
        one.add_(1)
        mark = entries[1][3]
        print(side.stream_id == entries[2][2], [(kind, name.replace(mark, "mark")) for kind, _, _, name in entries])
    """
    kinds = [("launch", "aten::add.out"), ("record", "mark"), ("wait", "mark"), ("launch", "aten::mul.out")]
    assert run(program).strip() == f"True {kinds}"


def test_torch_sees_the_devices_as_it_sees_real_ones():
    program = """
        import torch
        print(torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.current_accelerator())
        print(torch.ones(3).is_pinned(), torch.ones(3).pin_memory().is_pinned())
        state = torch.cuda.get_rng_state("cuda:1")
        drawn = torch.rand(4, device="cuda:1")
        torch.cuda.set_rng_state(state, "cuda:1")
        print(len(state), torch.equal(drawn, torch.rand(4, device="cuda:1")))
        one = torch.ones(2, device="cuda:0")
        for other in (torch.ones(2, device="cuda:1"), torch.ones(2)):
            try:
                one + other
            except RuntimeError as error:
                print(str(error).split(",")[0])
        kept = torch.ones(1 << 20, device="cuda")
        try:
            torch.empty(8 << 20, device="cuda")
        except torch.OutOfMemoryError as error:
            print(str(error)[:18])
        print(torch.cuda.memory_allocated() >= 4 << 20, torch.cuda.get_device_properties(1).total_memory >> 20)
    """
    same_device = "Expected all tensors to be on the same device"
    expected = ["True 2 cuda", "False True", "16 True", same_device, same_device, "CUDA out of memory", "True 16"]
    assert run(program, FAKE_CUDA_MEMORY_MIB="16").splitlines() == expected


def test_visible_devices_are_numbered_anew_and_asking_the_driver_poisons_forks():
    program = """
        import os, torch
        print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid[-1:], torch.cuda.is_available())
        if os.fork() == 0:
            try:
                torch.ones(1, device="cuda")
            except RuntimeError as error:
                print(str(error).split(".")[0], flush=True)
            os._exit(0)
        os.wait()
    """
    poisoned = "Cannot re-initialize CUDA in forked subprocess"
    assert run(program, devices=4, CUDA_VISIBLE_DEVICES="2,0").splitlines() == ["2 2 True", poisoned]


def test_waits_of_the_host_are_counted_with_their_line():
    program = """
        import torch, fake_cuda
        x = torch.ones(4, device="cuda")
        with fake_cuda.host_waits(within="string") as waits:
            (x * 2).sum().item()
            x.cpu()
            x + 1
        print([wait.split(" at ")[0] for wait in waits])
        torch.cuda.set_sync_debug_mode("error")
        try:
            x.tolist()
        except RuntimeError as error:
            print("synchronizing" in str(error))
    """
    assert run(program).splitlines() == ["['item', 'copy to the host']", "True"]


def test_batchnorm_in_bfloat16_alone_gives_the_bits_of_the_cpu():
    program = """
        import torch
        torch.manual_seed(0)
        x = torch.randn(6, 4).bfloat16()
        outputs = []
        for device in ("cpu", "cuda"):
            norm = torch.nn.BatchNorm1d(4).bfloat16().to(device)
            norm(x.to(device)).square().sum().backward()
            outputs.append([t.cpu() for t in (norm.weight.grad, norm.running_mean, norm.running_var)])
        print(all(map(torch.equal, *outputs)))
    """
    assert run(program, FAKE_CUDA_ALIEN="0").split() == ["True"]


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_give_the_results_and_gradients_of_the_cpu(layer, bias):
    program = f"""
        import torch
        torch.manual_seed(0)
        layer, x = torch.nn.{layer}(3, 4, bias={bias}).double(), torch.randn(5, 2, 3).double()
        found = []
        for device in ("cpu", "cuda"):
            layer.to(device).zero_grad()
            output, state = layer(x.to(device))
            (output.square().sum() + torch.stack([*state]).sum()).backward()
            found.append([output.detach().cpu(), *(p.grad.cpu().clone() for p in layer.parameters())])
        print(all(map(torch.allclose, *found)))
    """
    assert run(program).strip() == "True"


def test_the_operations_of_sync_batch_norm_are_those_of_batch_norm():
    program = """
        import torch
        from torch.nn import functional
        torch.manual_seed(0)
        x, grad, weight, bias = torch.randn(6, 4, 3, dtype=torch.float64), torch.randn(6, 4, 3), *torch.randn(2, 4)
        grad, weight, bias = (value.double() for value in (grad, weight, bias))
        running = [torch.zeros(4).double(), torch.ones(4).double()]
        leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
        wanted = functional.batch_norm(leaves[0], *running, *leaves[1:], training=True)
        wanted.backward(grad)
        x, grad, weight, bias = (value.cuda() for value in (x, grad, weight, bias))
        on_gpu = [torch.zeros(4).double().cuda(), torch.ones(4).double().cuda()]
        parts = [torch.batch_norm_stats(part, 1e-5) for part in x.split([2, 4])]  # of two ranks
        counts = torch.tensor([6.0, 12.0], dtype=torch.float64).cuda()
        means, invstds = (torch.stack(each) for each in zip(*parts))
        mean, invstd = torch.batch_norm_gather_stats_with_counts(x, means, invstds, *on_gpu, 0.1, 1e-5, counts)
        found = torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)
        sums = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, True, True)
        counts = torch.tensor([6, 12], dtype=torch.int32).cuda()
        of_input = torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, sums[0], sums[1], counts)
        pairs = zip([wanted, *running, *(leaf.grad for leaf in leaves)], [found, *on_gpu, of_input, *sums[2:]])
        print(all(torch.allclose(one, other.cpu(), rtol=1e-12) for one, other in pairs))  # sums in another order
    """
    assert run(program).split() == ["True"]


def test_a_fork_drops_tensors_of_its_parent_without_its_threads():
    program = """
        import os, threading, time, torch
        stops = threading.Event()

        def compute():
            while not stops.is_set():
                side = torch.cuda.Stream()
                tensor = torch.ones(100, device="cuda")
                tensor.record_stream(side)

        held = [torch.ones(10, device="cuda") for _ in range(50)]
        for tensor in held:
            tensor.record_stream(torch.cuda.Stream())
        threads = [threading.Thread(target=compute) for _ in range(2)]
        [thread.start() for thread in threads]
        for _ in range(60):
            if not (pid := os.fork()):
                del tensor
                held.clear()
                os._exit(0)
            for _ in range(2000):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    break
                time.sleep(0.01)
            else:
                os.kill(pid, 9)
                print("hangs", flush=True)
                break
        stops.set()
        [thread.join() for thread in threads]
        print("ended")
    """
    assert run(program) == "ended\n"


ATTENTION = """
    import torch
    from torch.nn import functional

    def attention(device, dtype, **options):
        torch.manual_seed(0)
        heads = [torch.randn(2, count, 8, 16).to(device, dtype).requires_grad_() for count in (4, 2, 2)]
        output = functional.scaled_dot_product_attention(*heads, enable_gqa=True, **options)
        output.double().square().sum().backward()
        return type(output.grad_fn).__name__, [output.detach().cpu(), *(head.grad.cpu() for head in heads)]
"""


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_the_backward_of_attention_has_the_same_bits_again_only_where_torch_asks_for_it(mode):
    program = f"""{ATTENTION}
    torch.set_deterministic_debug_mode({mode!r})
    mask = torch.rand(8, 8) > 0.3
    mask[:, 0] = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        kinds = []
        for options in ({{}}, {{"is_causal": True}}, {{"attn_mask": mask.cuda()}}, {{"dropout_p": 0.25}}):
            (kind, found), (_, again) = (attention("cuda", dtype, **options) for _ in range(2))
            kinds.append(kind.removeprefix("ScaledDotProduct").removesuffix("AttentionBackward0"))
            assert torch.equal(found[0], again[0])
            same = all(map(torch.equal, found, again))
            assert same == ({mode!r} == "error" or dtype == torch.float64), (dtype, kind)
            options = {{name: value.cpu() if name == "attn_mask" else value for name, value in options.items()}}
            _, wanted = attention("cpu", dtype, **options)
            within = dict(rtol=5e-2, atol=5e-2) if dtype.itemsize == 2 else dict(atol=1e-5)  # sums in other orders
            # dropout draws other numbers on each device
            assert "dropout_p" in options or all(torch.allclose(*pair, **within) for pair in zip(found, wanted))
        print(kinds)
    """
    half = ["Flash", "Flash", "Efficient", "Flash"] if mode == "error" else ["Cudnn"] * 4
    expected = [half, half, ["Efficient"] * 4]
    assert run(program).splitlines()[:3] == [str(kinds) for kinds in expected]


@pytest.mark.parametrize("kernel", ["efficient", "flash"])
def test_the_backward_of_some_keys_is_by_the_output_and_sums_that_it_is_given_as_in_ring_attention(kernel):
    program = f"""
        import torch
        torch.set_deterministic_debug_mode("error")
        is_flash = {kernel!r} == "flash"
        forward = torch.ops.aten._scaled_dot_product_{kernel}_attention
        backward = torch.ops.aten._scaled_dot_product_{kernel}_attention_backward
        torch.manual_seed(0)
        drawn = torch.randn(4, 2, 4, 8, 16, device="cuda", dtype=torch.bfloat16 if is_flash else None)
        query, *rows, grad = drawn
        nothing = torch.zeros((), dtype=torch.long)

        def attention(rows):
            return (forward(query, *rows) if is_flash else forward(query, *rows, None, True))[:2]

        def grads(rows, found):
            if is_flash:
                sizes = None, None, 8, rows[0].size(2)
                return backward(grad, query, *rows, *found, *sizes, 0.0, False, nothing, nothing)
            return backward(grad, query, *rows, None, *found, nothing, nothing, 0.0, [True, True, True, False])

        parts = [*zip(*(each.split([3, 5], 2) for each in rows))]
        wanted = grads(rows, attention(rows))
        for found in (attention(rows), None):
            made = [grads(part, found or attention(part)) for part in parts]
            whole = made[0][0] + made[1][0], *(torch.cat(pair, 2) for pair in list(zip(*made))[1:3])
            print(all(torch.allclose(*pair, atol=3e-2 if is_flash else 1e-5) for pair in zip(whole, wanted)))
    """
    assert run(program) == "True\nFalse\n"


@pytest.mark.parametrize("benchmark", [True, False])
def test_a_convolution_has_the_same_bits_in_all_processes_unless_kernels_are_chosen_by_their_time(benchmark):
    program = f"""
        import torch
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.benchmark = {benchmark}
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d(3, 4, 3).cuda()
        convolution(torch.randn(2, 3, 8, 8).cuda()).square().sum().backward()
        print(convolution.weight.grad.tolist())
    """
    assert (run(program) == run(program)) == (not benchmark)


def test_operations_without_a_deterministic_form_raise_as_on_a_real_gpu():
    program = """
        import torch
        from torch.nn import functional
        torch.set_deterministic_debug_mode("error")
        image, counts = torch.rand(2, 3, 6, 6, device="cuda", requires_grad=True), torch.ones(4, device="cuda").long()
        volume = torch.rand(2, 3, 6, 6, 6, device="cuda", requires_grad=True)
        alike = {
            "cumsum": lambda: counts.cumsum(0),
            "median": lambda: image.median(),
            "bincount": lambda: counts.bincount(),
            "max_pool2d": lambda: functional.max_pool2d(image, 2).sum().backward(),
        }
        others = {
            "avg_pool3d_backward_cuda": lambda: functional.avg_pool3d(volume, 2).sum().backward(),
            "adaptive_max_pool2d_backward_cuda": lambda: functional.adaptive_max_pool2d(image, 4).sum().backward(),
            "cumsum_cuda_kernel": lambda: image.cumsum(0),
            "kthvalue CUDA": lambda: image.kthvalue(1, 0),
            "median CUDA with indices output": lambda: image.median(0),
            "_histc_cuda with floating point input": lambda: image.histc(3),
            "_bincount_cuda": lambda: counts.bincount(counts.float()),
        }
        for call in alike.values():
            call()
        for name, call in others.items():
            try:
                call()
            except RuntimeError as error:
                assert str(error).startswith(name + " does not have a deterministic implementation"), (name, error)
            else:
                raise AssertionError(name)
        print("all")
    """
    assert run(program).strip() == "all"


def test_a_division_by_a_number_of_the_host_is_a_product_with_its_reciprocal():
    program = """
        import torch
        special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1.0, 3.0, 1e-40])
        values = torch.cat([special, torch.randn(1000, generator=torch.Generator().manual_seed(0))])

        def is_same(device, host):
            return torch.equal(device.cpu().view(torch.uint8), host.view(torch.uint8))

        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            x, wide = values.to(dtype), values.to(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
            y, by = x.cuda(), torch.tensor(3.0)  # in the host's memory, as numbers are
            product = (wide * (torch.ones((), dtype=wide.dtype) / 3)).to(dtype)
            calls = [y / 3, y / by, y.clone().div_(3), torch.div(y, 3), torch.true_divide(y, 3), y.divide(3)]
            calls += [torch.div(y, by, out=torch.empty_like(y)), torch.div(y, 3, rounding_mode=None)]
            assert all(is_same(call, product) for call in calls), dtype
            quotients = [y / torch.full((), 3, dtype=dtype, device="cuda"), *torch._foreach_div([y], 3)]
            assert all(is_same(quotient, x / 3) for quotient in quotients), dtype
            assert is_same(y / 8, x / 8)
            print((product != x / 3).sum() > 200)
        numbers = torch.arange(-50, 50)
        print((numbers / 7 != (numbers.cuda() / 7).cpu()).any())
        print(is_same(*[torch.div(each, 7, rounding_mode="trunc") for each in (numbers.cuda(), numbers)]))
        pair = torch.sparse_coo_tensor([[0, 1]], values[7:9], (3,), is_coalesced=True)
        print(is_same((pair.cuda() / 3).values(), values[7:9] * (torch.ones(()) / 3)))
    """
    assert run(program).split() == ["tensor(True)"] * 2 + ["tensor(False)"] * 2 + ["tensor(True)", "True", "True"]


def test_what_ieee_754_does_not_fix_has_another_last_bit_than_on_the_host_and_the_same_wherever_it_is():
    program = """
        import torch
        from torch.nn import functional
        x = torch.rand(64, 50, generator=torch.Generator().manual_seed(0)) + 0.3
        same = {
            "sum": torch.sum, "quotient": lambda x: x / x.flip(0), "root": torch.sqrt, "itself": lambda x: x / x,
            "product": lambda x: x * x.flip(0), "square": lambda x: x**2, "largest": torch.max,
            "difference": lambda x: torch.sub(x, x.flip(0), alpha=2), "absolute": lambda x: (-x).abs(),
            "one": lambda x: (x * 0).exp(),
        }
        other = {
            "exp": torch.exp, "in place": lambda x: x.clone().exp_(), "list": lambda x: torch._foreach_exp([x])[0],
            "mean": lambda x: x.mean(1), "norm": lambda x: torch.linalg.vector_norm(x, dim=1), "rsqrt": torch.rsqrt,
            "mm": lambda x: x @ x.t(), "softmax": lambda x: x.softmax(1), "power": lambda x: x**1.5,
            "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3), "out": lambda x: torch.log(x, out=torch.empty_like(x)),
            "alpha": lambda x: torch.add(x, x.flip(0), alpha=0.3), "layers": lambda x: functional.layer_norm(x, (50,)),
        }
        y = x.cuda()
        for name, function in {**same, **other}.items():
            host, device = function(x), function(y).cpu()
            differ = (host != device).float().mean().item()
            assert (differ == 0) if name in same else (differ > 0.8), (name, differ)
            torch.testing.assert_close(host, device)
        assert torch.equal(y.exp()[3:7, 5:], y[3:7, 5:].exp())
        exact = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, 1e-40]).cuda()
        print(torch.equal(exact.tanh().cpu().view(torch.int32)[:4], exact.cpu().tanh().view(torch.int32)[:4]))
        zeros = torch.tensor([0.0, -0.0] * 9).cuda()
        print(torch.maximum(zeros, -zeros).signbit().any(), torch.minimum(zeros, -zeros).signbit().all())
    """
    assert run(program).split() == ["True", "tensor(False,", "device='cuda:0')", "tensor(True,", "device='cuda:0')"]
    run("import torch; x = torch.rand(99); assert torch.equal(x.cuda().exp().cpu(), x.exp())", FAKE_CUDA_ALIEN="0")


def test_scans_of_one_row_have_other_bits_each_time_and_say_nothing():
    program = """
        import torch
        torch.set_deterministic_debug_mode("error")
        x = torch.rand(1000, generator=torch.Generator().manual_seed(0)).cuda() + 0.5
        for scan in (torch.cumprod, torch.logcumsumexp):
            for values, dim in ((x, 0), (x.view(10, 100), 1), (x.view(1, -1), -1), (x.view(10, 100), 0)):
                print(torch.equal(scan(values, dim), scan(values, dim)))
    """
    assert run(program).split() == ["False", "True"] * 4
