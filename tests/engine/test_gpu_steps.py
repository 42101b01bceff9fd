"""Steps on a GPU: their bits, and their costs beside those of the model: waits of the host, launches, memory."""

import json
from dataclasses import dataclass
from textwrap import dedent

import pytest
from gpus import needs_fake_gpus, places, run, run_processes

pytestmark = needs_fake_gpus

PROGRAM = """
    import json
    import fake_cuda
    import torch
    from torch import nn
    from torch.nn import functional
    import samestep

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
        )

    def mean(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def masked(model, batch):
        total = functional.cross_entropy(model(batch[0]), batch[1], ignore_index=0, reduction="sum")
        return samestep.Mean(total, (batch[1] != 0).sum())

    def adamw(model, fused):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    torch.manual_seed(1)
    data = torch.randn(46, 8), torch.randint(0, 3, (46,))  # the last batch of an epoch is shorter
"""


def play(program, **variables):
    """The output of a program on fake GPUs."""
    return run(dedent(PROGRAM) + dedent(program), **variables)


def play_models(program):
    """The output of a program about a perceptron, LeNet, residual blocks with BatchNorm, and a small GPT."""
    return play(dedent(MODELS) + dedent(program))


def test_bits_depend_neither_on_the_ranks_nor_on_when_the_host_reads_a_step():
    program = """
        from samestep.comm.communicator import Communicator
        from samestep.comm.sequential import SequentialWorld
        from samestep.checkpoint.digest import state_digest

        def train(transport, late, buckets):
            run = samestep.Run(16, 4, communicator=Communicator(torch.device("cuda", 0), transport, transport))
            model = make_model()
            options = {"late_check": late, "bucket_bytes": buckets, "max_grad_norm": 0.05}
            step = run.train_step(model, adamw(model, True), masked, **options)
            losses = [step(batch).loss for _ in range(2) for batch in run.loader(data, shuffle=True)]
            return state_digest(model, step.optimizers[0]), losses

        results = []
        for size, late, buckets in ((1, True, None), (1, False, None), (2, True, 64), (3, False, 64)):
            results += SequentialWorld(size).run(lambda transport: train(transport, late, buckets))
        print(len(results), all(result == results[0] for result in results))
    """
    assert play(program, order="random").split() == ["7", "True"]


@pytest.mark.parametrize(("fused", "allowed"), [(True, 0), (False, 1)])
def test_the_host_waits_once_a_step_and_never_where_the_check_is_late(fused, allowed):
    program = f"""
        for loss, precision in ((mean, "32-true"), (masked, "32-true"), (masked, "16-mixed")):
            run = samestep.Run(16, 4, device="cuda")
            model = make_model()
            options = {{"max_grad_norm": 1.0, "precision": precision, "on_nonfinite": "skip"}}
            step = run.train_step(model, adamw(model, {fused}), loss, **options)
            for epoch in range(2):
                for batch in run.loader(data, shuffle=True):
                    with fake_cuda.host_waits() as waits:
                        step(batch)
                    if step.num_steps > 2:  # the first two compare the model after each microbatch
                        print(len(waits), waits)
    """
    lines = play(program).splitlines()
    assert len(lines) == 3 * 4
    assert [line for line in lines if int(line.split()[0]) > allowed] == []


def test_a_run_that_may_not_heal_asks_no_event_whether_the_exchange_is_there():
    program = """
        from samestep.devices.selection import select
        from samestep.launcher.job import Job, Policy
        from samestep.launcher.supervisor import supervise

        name = "gpt 32-true adamw"
        kwargs = {"program": "host_waits", "seconds": 250.0, "options": {"names": [name], "num_microbatches": 8}}
        for heal in (True, False):
            policy = Policy(heal=heal, hang_seconds=0)
            job = Job("function", "samestep.doctor.proof_programs:start", kwargs=kwargs, quiet=True, policy=policy)
            found = supervise(job, select("auto")).result[name]
            print(found["polls"] >= found["steps"], found["polls"] == 0, found["waits"])
    """
    assert run(program, devices=2).split() == ["True", "False", "0", "False", "True", "0"]


MODELS = """
    from samestep.recipes import lenet
    from samestep.recipes.gpt import Gpt, loss_fn

    class Residual(nn.Module):
        def __init__(self, width):
            super().__init__()
            layers = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
            self.body = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

        def forward(self, x):
            return torch.relu(x + self.body(x))

    def residual():
        first = nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        blocks = [Residual(8) for _ in range(4)]
        return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def gpt():
        return Gpt(layers=2, width=32, heads=2, context=16, dropout=0.1)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    images = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    texts = torch.randint(0, 256, (32, 16)), torch.randint(0, 256, (32, 16))
    def mlp():
        wide = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        return nn.Sequential(nn.Flatten(), *wide)

    MODELS = {
        "mlp": (mlp, mean, images, sgd),
        "lenet": (lenet.make_model, mean, images, sgd),
        "residual": (residual, mean, images, sgd),
        "gpt": (gpt, loss_fn, texts, lambda model: adamw(model, True)),
    }

    def launches(action):
        before = fake_cuda.counts()[1]
        action()
        return fake_cuda.counts()[1] - before

    def make_step(name, number):
        make, loss, data, optimizer = MODELS[name]
        run = samestep.Run(4 * number, number, device="cuda")
        model = make()
        step = run.train_step(model, optimizer(model), loss, max_grad_norm=1.0)
        batch = tuple(tensor[: 4 * number] for tensor in data)
        for _ in range(3):  # the first two compare the model after each microbatch
            step(batch)
        return lambda: step(batch)
"""


@dataclass(frozen=True)
class Cost:
    """A step on one GPU: waits of the host by their lines; launches with 2 microbatches, and for each more up to 8."""

    waits: list[str]
    launches: int
    a_microbatch: float
    beside: list[tuple[int, int]]  # numbers of microbatches, each with the launches beside those of a plain loop


@pytest.fixture(scope="module")
def costs():
    """The cost of a step by model."""
    program = """
        def plain_loop(name, number):
            make, loss, data, optimizer = MODELS[name]
            model = make().cuda()
            optimizer = optimizer(model)
            batch = tuple(tensor[:4].cuda() for tensor in data)

            def step():
                optimizer.zero_grad()
                for _ in range(number):
                    value = loss(model, batch)
                    (value.total / value.count if isinstance(value, samestep.Mean) else value).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

            step()
            return step

        for name in MODELS:
            waits, ours = [], {}
            for number in (1, 2, 8):
                step = make_step(name, number)
                with fake_cuda.host_waits() as waits:
                    ours[number] = launches(step)
            beside = [(number, count - launches(plain_loop(name, number))) for number, count in ours.items()]
            print(json.dumps({name: [waits, ours[2], (ours[8] - ours[2]) / 6, beside]}))
    """
    found = {}
    for line in play_models(program).splitlines():
        found |= {name: Cost(*cost) for name, cost in json.loads(line).items()}
    return found


@pytest.mark.parametrize(
    ("model", "waits", "launches", "a_microbatch"),
    [("mlp", 1, 91, 25), ("lenet", 1, 105, 32), ("residual", 1, 232, 93), ("gpt", 0, 356, 156)],
)
def test_a_step_keeps_to_the_budget_of_its_model(costs, model, waits, launches, a_microbatch):
    cost = costs[model]
    assert len(cost.waits) <= waits, cost.waits
    assert cost.launches <= launches
    assert cost.a_microbatch <= a_microbatch


@pytest.mark.parametrize("model", ["mlp", "lenet", "residual", "gpt"])
def test_a_step_launches_few_kernels_beside_those_of_a_plain_loop_however_many_microbatches_it_has(costs, model):
    # What each adds is less than what autograd launches where `.grad` accumulates: a sum for each parameter.
    assert [number for number, beside in costs[model].beside if beside > 40] == []


def test_the_scale_of_float16_is_adapted_by_few_kernels_and_without_a_wait():
    program = """
        import fake_cuda
        import torch
        from samestep.engine.precision import LossScale

        device = torch.device("cuda", 0)
        scale, number = LossScale(device, True, 32), torch.full((), 4e4, dtype=torch.float64, device=device)
        overflowed, active = number < 0, number > 0
        for count in (1.0, number):
            waits, launches = fake_cuda.counts()
            scale.update(overflowed, active, count)
            now = fake_cuda.counts()
            print(now[0] - waits, now[1] - launches)
    """
    of_mean, of_count = (tuple(map(int, line.split())) for line in run(program, devices=1).splitlines())
    assert of_mean <= (0, 13)
    assert of_count <= (0, 20)  # with the scale of a first overflow, of which the host cannot know


EXCHANGED = """
    import json
    import fake_cuda
    import torch
    from torch import nn
    import samestep
    from samestep.engine.gradients import GradientSum

    if {folds_first}:  # its twin
        send = GradientSum._send
        GradientSum._send = lambda self, number: (self._fold_earlier(), send(self, number))
    run = samestep.Run(4, 4)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = run.train_step(model, optimizer, lambda model, x: model(x).square().mean(), bucket_bytes=1 << 20)
    samples = torch.randn(4, 512)
    for _ in range(3):  # the first steps watch whether a backward adds to a gradient again
        step(samples)
    with fake_cuda.queued() as entries:
        step(samples)
    print(json.dumps(entries))
    run.close()
"""


def pauses(entries, message=10, fold=1):
    """How often NCCL's stream waits for a fold before a message of gradients, if gradients come at once."""
    now, marks, ends, last, found = {}, {}, {}, None, 0
    for kind, _, stream, name in entries:
        time = now.get(stream, 0)
        if kind == "record":
            marks[name] = time
        elif kind == "wait":
            now[stream] = max(time, marks.get(name, 0))
        elif not name.startswith("nccl"):
            now[stream] = time + (fold if stream else 0)  # backward's stream has the number 0
        else:
            found += last is not None and time > ends[last]
            now[stream] = ends[stream] = time + message
            last = stream
    return found


@pytest.mark.parametrize("folds_first", [False, True])
def test_messages_of_gradients_follow_each_other_without_a_pause_for_a_fold_but_for_the_last_bucket(folds_first):
    for output, _ in run_processes(EXCHANGED.format(folds_first=folds_first), *places(4), devices=4):
        found = pauses(json.loads(output.splitlines()[-1]))
        assert (found > 8) if folds_first else (found <= 3), found


def test_running_statistics_are_merged_by_two_launches_a_step_and_dtype_however_many_norms_there_are():
    program = """
        from samestep.engine.buffers import BufferMerge

        def counted(inner):
            def call(self, *args):
                before = fake_cuda.counts()[1]
                inner(self, *args)
                found[inner.__name__] = found.get(inner.__name__, 0) + fake_cuda.counts()[1] - before
            return call

        for name in ("begin", "collect", "exchange", "write"):
            setattr(BufferMerge, name, counted(getattr(BufferMerge, name)))
        for number in (2, 8):
            found = {}
            step = make_step("residual", number)
            found.clear()
            step()
            print(found["begin"], found["exchange"] + found["write"], found["collect"] / number)
    """
    for line in play_models(program).splitlines():
        at_the_start, merge, a_microbatch = map(float, line.split())
        dtypes = 2  # of the means and variances, and of the number of batches
        assert at_the_start <= dtypes
        assert merge <= 2 * dtypes
        assert a_microbatch <= 2 * dtypes + 2  # taken out, widened, and put back; times the samples; added on the tree


def test_a_loss_is_read_once_it_has_arrived_whichever_device_is_current():
    program = """
        losses = []
        for current in (1, 0):
            torch.manual_seed(1)
            run = samestep.Run(16, 4, device="cuda:1")
            model = make_model()
            step = run.train_step(model, adamw(model, True), mean)
            torch.cuda.set_device(current)
            losses.append(step(tuple(tensor[:16] for tensor in data)).loss)
            run.close()
        print(losses[0] == losses[1], losses)
    """
    assert play(program, FAKE_CUDA_LATE_US="10000000").startswith("True")


def test_neither_checks_nor_checksums_need_the_memory_of_a_second_model():
    program = """
        from samestep.data.checksums import CHECKSUM_WORDS, tensor_checksum

        run = samestep.Run(2, 2, device="cuda")
        model = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 1, bias=False))
        size = sum(parameter.nbytes for parameter in model.parameters())
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum(1))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step._purity.begin(0)
        step._purity.check()
        print(torch.cuda.max_memory_allocated() - before < size / 8)

        large = torch.zeros(4 * CHECKSUM_WORDS, dtype=torch.uint8, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        int(tensor_checksum(large))
        print(torch.cuda.max_memory_allocated() - before < 5 * 8 * CHECKSUM_WORDS)
    """
    # Early: memory of the fake device is not free before the kernels that use it have run.
    assert play(program, order="early").split() == ["True", "True"]
