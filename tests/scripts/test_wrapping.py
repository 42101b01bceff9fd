"""Scripts that wrap nothing: a module is shared out by its name, or a hint says that one could be named."""

from textwrap import dedent

import pytest
import torch
from script_runs import check_close, trainer
from simulated_programs import alone
from torch import nn
from worlds import DEVICE, cpu_only

from samestep.errors import UsageError
from samestep.scripts.auto_wrap import shared_out
from samestep.scripts.data_parallel import DataParallel

STEPS = 3
PRELUDE = """
import hashlib
import torch
from torch import nn

torch.manual_seed(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))

def digest(module):
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters())).hexdigest()

def batches():
    for _ in range(3):
        yield torch.randn(12, 6), torch.randint(3, (12,))

def step(net, criterion, optimizer, x, y):
    optimizer.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    optimizer.step()
"""
PLAIN = """
model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    step(model, criterion, optimizer, x, y)
RESULT = digest(model)
"""
IN_A_FUNCTION = """
def main():
    network = Net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for x, y in batches():
        step(network, nn.CrossEntropyLoss(), optimizer, x, y)
    return digest(network)

RESULT = main()
"""
IN_A_CLASS = """
class Trainer:
    def __init__(self):
        self.model = Net()
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def fit(self):
        for x, y in batches():
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()

trainer = Trainer()
trainer.fit()
RESULT = digest(trainer.model)
"""
FROM_SCRATCH = """
import samestep
from samestep.tutorial import allreduce, replicate_params, split_and_load
replicas = replicate_params(list(Net().parameters()), 4)
for x, y in batches():
    for (x, y), (w, b, *_) in zip(split_and_load((x, y), 4), replicas):
        (x @ w.T + b).sum().backward()
    allreduce([[p.grad for p in replica[:2]] for replica in replicas])
"""


@pytest.fixture
def train(worlds, tmp_path):
    """`train(n, body, wrap, …)`: the outcomes of a script on n processes."""
    return trainer(worlds, tmp_path, PRELUDE)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (PLAIN, "model"),
        (PLAIN, "Net"),
        (IN_A_FUNCTION, "network"),
        (IN_A_CLASS, "trainer.model"),
        (IN_A_CLASS, "self.model"),
    ],
)
def test_the_named_module_is_shared_out_and_ends_in_the_same_bits(train, body, name):
    (reference,) = train(1, body, name)
    assert not reference.error, reference.message
    assert len(reference.chunks) == STEPS * 4
    outcomes = train(3, body, name)
    assert outcomes[0].result == reference.result
    assert sorted(chunk for outcome in outcomes for chunk in outcome.chunks) == sorted(reference.chunks)
    assert outcomes[0].stderr == "", "there is nothing to hint at"


BY_HAND = """
model = Net()
for x, y in batches():
    nn.CrossEntropyLoss()(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
            p.grad = None
RESULT = digest(model)
"""


def test_twin_a_script_without_an_optimizer_is_not_shared_out_and_told_once_what_it_could_name(train):
    (shared,) = train(1, BY_HAND, "model")
    first, second = train(2, BY_HAND)
    assert first.chunks == second.chunks == ()
    assert first.result != shared.result
    assert first.stderr.count("called no module that has most of what an optimizer trains: nothing is shared out") == 1
    assert "samestep run --wrap model train.py …" in first.stderr
    assert train(1, BY_HAND)[0].stderr == first.stderr


IN_LISTS = """
weights, loss = [torch.zeros(6, 3, requires_grad=True)], nn.CrossEntropyLoss()
for x, y in batches():
    loss(x @ weights[0], y).backward()
RESULT = weights[0].grad.sum().item()
"""


def test_a_script_that_keeps_its_parameters_in_lists_is_led_to_the_functions_for_that(train):
    where = "samestep.tutorial: see docs/tutorials.md, LeNet from scratch"
    assert where in train(1, IN_LISTS)[0].stderr
    message = train(1, IN_LISTS, "net")[0].message
    assert "called: loss (CrossEntropyLoss). None has parameters. Parameters in lists" in message
    assert where in message


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        (
            "small, large = nn.Linear(2, 2), nn.Linear(50, 50)\nsmall(torch.ones(1, 2)).sum().backward()",
            ["--wrap large"],
        ),
        ("torch.ones(2, requires_grad=True).sum().backward()", ["--wrap NAME, a variable or class of the script"]),
        (
            "model = nn.DataParallel(nn.Linear(6, 2), device_ids=[0])\nmodel(torch.ones(4, 6)).sum().backward()",
            ["wraps model for one device, which computes all of it", "samestep run --logical-devices 2"],
        ),
        (FROM_SCRATCH, ["this process computes all 4 devices of samestep.tutorial, one after another"]),
    ],
)
def test_the_hint_names_the_largest_model_or_the_number_of_microbatches(train, body, texts):
    outcome = train(2, body, None, None)[0]
    assert not outcome.error, outcome.message
    assert all(text in outcome.stderr for text in texts)
    assert bool(outcome.stderr) == bool(texts)


def test_only_calls_of_the_named_module_are_shared_out(train):
    body = """
    model, other = Net(), Net()
    x = torch.randn(12, 6)
    other(x), other.body(x), model.body(x)
    sizes = [module(x).shape[0] for module in (model, other)]
    """
    assert len(train(1, body, "model")[0].chunks) == 4


def test_a_compiled_module_goes_by_the_name_of_either():
    model = nn.Linear(6, 3)
    fast = torch.compile(model, backend="eager")
    for name in ("model", "fast", "Linear"):
        script = alone()
        with shared_out(script, name):
            fast(torch.ones(8, 6))
        assert len(script.chunks_run) == 4, name


def test_with_one_microbatch_the_module_is_simply_called(train):
    (outcome,) = train(1, PLAIN, "model", 1)
    assert outcome.chunks == ()
    assert outcome.result == train(1, PLAIN, None, 1)[0].result
    assert train(2, PLAIN, None, 1)[0].stderr == "", "that is what the user asked for"


def test_a_module_that_is_wrapped_already_is_left_to_its_wrapper(train):
    body = "model = nn.DataParallel(nn.Linear(6, 2), device_ids=[0])\nRESULT = model(torch.ones(4, 6)).shape[0]"
    (outcome,) = train(1, body, "model")
    assert not outcome.error, outcome.message
    assert len(outcome.chunks) == 4


AS_COMPILED = """
made = nn.Module.__init__

def noted(self, *args, **options):
    made(self, *args, **options)

nn.Module.__init__ = noted
"""  # so torch.compile puts its own in the place of torch's


@pytest.mark.parametrize(
    ("start", "end"), [("", ""), ("", "import sys\nsys.exit()\n"), (AS_COMPILED, "nn.Module.__init__ = made\n")]
)
def test_a_name_that_was_never_called_is_an_error_that_lists_what_was(train, start, end):
    for outcome in train(2, start + PLAIN + end, "modle"):
        assert outcome.error == "UsageError"
        assert outcome.message.startswith("got --wrap modle, and the script called no module of that name.")
        assert "called: net (Net), criterion (CrossEntropyLoss). Give" in outcome.message
        assert "samestep.tutorial" not in outcome.message


@pytest.mark.parametrize(
    ("body", "called"),
    [
        (IN_A_CLASS, "self.model (Net), self.criterion (CrossEntropyLoss)."),
        ("nn.ReLU()(torch.ones(3))", "ReLU."),
        ("RESULT = 1", "none."),
    ],
)
def test_a_called_module_is_named_as_an_attribute_where_no_variable_holds_it(train, body, called):
    assert f"called: {called}" in train(1, body, "model")[0].message


def test_a_script_that_fails_before_the_name_is_met_keeps_its_own_error(train):
    assert train(1, "raise KeyError('x')", "model")[0].error == "KeyError"
    assert train(1, "raise SystemExit(3)", "model")[0].exit_code == 3


@pytest.mark.parametrize("name", ["", "my model", "model.", "1x", "model[0]", "model:", "model:x", "model:1.0", ":1"])
def test_a_text_that_can_be_no_name_is_refused(name):
    with pytest.raises(UsageError, match="give a variable or class of the script"), shared_out(alone(), name):
        pass


def test_a_name_means_the_local_where_there_is_one_and_it_is_bound(train):
    body = """
    model, other, x = Net(), Net(), torch.randn(12, 6)

    def hides(model):
        model(x)

    def binds_late():
        other(x)
        model = other
        model(x)

    def holds():
        model = other
        def inner():
            model(x)
        inner()

    {call}
    """
    for call in ("hides(other)", "binds_late()", "holds()"):
        assert len(train(1, dedent(body).format(call=call), "model")[0].chunks) == 4, call
    assert "called: other (Net)." in train(1, dedent(body).format(call="other(x)"), "model")[0].message


def test_a_subclass_of_samesteps_own_wrapper_with_parts_of_its_own_is_refused_by_name():
    class Own(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            raise AssertionError("not reached")

    with pytest.raises(UsageError, match=r"Own overrides DataParallel\.scatter"):
        Own(nn.Linear(2, 1))(torch.ones(4, 2))


ON_A_DEVICE = """
    class Net(nn.Linear):
        def forward(self, x):
            print("inside", x.device, self.weight.device)
            return super().forward(x)

    model = Net(3, 2).to("{device}")
    y = model(torch.ones(8, 3, device="{device}"))
    y.square().mean().backward()
    print(y.device, model.weight.grad.device)
    RESULT = {{"y": y, "grad": model.weight.grad}}
"""


@pytest.mark.parametrize(
    ("n", "device"),
    [pytest.param(n, "cpu", marks=cpu_only("in a run on GPUs it is refused")) for n in (1, 2)] + [(2, "cuda:1")],
)
def test_a_model_has_its_inputs_and_outputs_where_it_is(train, n, device):
    outcomes = train(n, ON_A_DEVICE.format(device=device), "model")
    assert [outcome.error for outcome in outcomes] == [""] * n, outcomes[0].message
    chunks = [device] * 4 if DEVICE == "cpu" else ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]  # those of the ranks
    assert outcomes[0].stdout.splitlines() == [
        *(f"inside {seen} {seen}" for seen in chunks),
        f"{chunks[0]} {chunks[0]}",
    ]


def test_a_model_on_the_cpu_is_refused_where_the_run_is_on_gpus():
    model = nn.Linear(3, 2)
    with (
        pytest.raises(UsageError, match="model is on the CPU and the run on cuda"),
        shared_out(alone(device="cuda"), "model"),
    ):
        model(torch.ones(8, 3))


TIME_MAJOR = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.out = nn.Embedding(11, 8), nn.GRU(8, 8, 2), nn.Linear(8, 11)

        def forward(self, words, hidden):
            h, hidden = self.rnn(self.embedding(words), hidden)
            return self.out(h), hidden

    torch.manual_seed(4)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hidden = torch.zeros(2, 6, 8, dtype=torch.float64)
    losses = []
    for _ in range(3):
        words = torch.randint(11, (5, 6))
        scores, hidden = model(words, hidden.detach())
        loss = nn.functional.cross_entropy(scores[:-1].view(-1, 11), words[1:].view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    RESULT = {"losses": losses, "hidden": hidden, "state": model.state_dict()}
"""


def test_batches_along_another_dim_give_what_the_script_alone_gives(train):
    (whole,) = train(1, TIME_MAJOR, "model", 1)
    results = [train(n, TIME_MAJOR, "model:1") for n in (1, 3)]
    for outcomes in results:
        assert all(outcome.result == results[0][0].result for outcome in outcomes), outcomes[0].message
        assert sum(len(outcome.chunks) for outcome in outcomes) == 9, "six sequences are three chunks"
    check_close(results[0][0].result, whole.result, rtol=1e-9, atol=1e-12)  # another sum
    for outcome in train(2, TIME_MAJOR, "model"):
        assert outcome.error == "UsageError"
        assert "--wrap model:1" in outcome.message
