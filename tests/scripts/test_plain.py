"""Plain scripts: the module that an optimizer trains is found, compared and shared out, or refused by name."""

from contextlib import nullcontext
from textwrap import dedent

import pytest
import torch
from script_runs import check_close, trainer
from simulated_programs import alone
from torch import nn
from worlds import cpu_only

from samestep.errors import UsageError
from samestep.scripts.auto_wrap import shared_out
from samestep.scripts.split_forward import compare

PRELUDE = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
RESULT = {"losses": []}

def batches(count=3, rows=14):
    draws = torch.Generator(torch.get_default_device()).manual_seed(2)
    for _ in range(count):
        yield torch.randn(rows, 6, generator=draws), torch.randint(3, (rows,), generator=draws)

def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    RESULT["losses"].append(loss.item())

class Net(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **options):
        return self.function(self, *inputs, **options)

def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches():
        result = model(x)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        optimizer.step()
    RESULT["state"] = model.state_dict()
"""
STRUCTURES = """
@dataclass
class Output:
    scores: torch.Tensor
    parts: dict

def forward(self, batch, labels=None, scale=None):
    h = torch.tanh(self.body(batch["x"]))
    return Output(self.head(h) * scale, {"mean": (h.square().mean(), h.mean(0)), "rows": [h, None, "text"]})

def make():
    return Net(forward, body=nn.Linear(6, 8), head=nn.Linear(8, 3))

model, seen = make(), []
model.register_forward_hook(lambda module, inputs, output: seen.append(output.scores.shape[0]))
model.body.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(batches(4)):
    output = model({"x": x}, scale=torch.full((1, 3), 2.0))
    loss = F.cross_entropy(output.scores, y) + output.parts["mean"][0] + output.parts["mean"][1].square().sum()
    (loss / 2).backward()
    if number % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    RESULT["losses"].append(loss.item())
torch.save(model.state_dict(), "saved.pt")
again = make()
again.load_state_dict(torch.load("saved.pt"))
RESULT["state"], RESULT["seen"] = again.state_dict(), tuple(seen)
"""
GAN = """
G = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))
D = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
of_g, of_d = torch.optim.Adam(G.parameters(), lr=0.01), torch.optim.Adam(D.parameters(), lr=0.01)
for x, _ in batches():
    fake = G(x[:, :2])
    of_d.zero_grad()
    loss_d = F.softplus(-D(x)).mean() + F.softplus(D(fake.detach())).mean()
    loss_d.backward()
    of_d.step()
    of_g.zero_grad()
    loss_g = F.softplus(-D(fake)).mean()
    loss_g.backward()
    of_g.step()
    RESULT["losses"] += [loss_d.item(), loss_g.item()]
RESULT["G"], RESULT["D"] = G.state_dict(), D.state_dict()
"""
LOSS_INSIDE = """
def forward(self, ids, labels, count=None):
    scores = self.head(self.embedding(ids))
    kind = "mean" if count is None else "sum"
    loss = F.cross_entropy(scores[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), reduction=kind)
    return {{"loss": loss if count is None else loss / count, "scores": scores}}

model = Net(forward, embedding=nn.Embedding(11, 8), head=nn.Linear(8, 11))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
draws = torch.Generator(torch.get_default_device()).manual_seed(2)
for step in range(4):
    ids = torch.randint(11, (7, 5), generator=draws)
    ends = torch.randint(2, 6, (7, 1), generator=draws) if step else 5
    labels = ids.masked_fill(torch.arange(5) >= ends, -100)
    if step == 3:
        labels[:2] = -100
    loss = model(ids, labels, {count})["loss"]
    update(optimizer, loss)
RESULT["state"] = model.state_dict()
"""
PACKED = """
from torch.nn.utils import rnn

def forward(self, packed, scale):
    steps, (last, _) = self.lstm(packed)
    return self.out(last[-1]) * scale, steps

table = nn.Parameter(torch.randn(9, 6))
model = WRAP(Net(forward, lstm=nn.LSTM(6, 8, batch_first=True), out=nn.Linear(8, 3)))
optimizer = torch.optim.SGD([table, *model.parameters()], lr=0.3)
for step, (x, y) in enumerate(batches(4)):
    lengths = torch.randint(1, 6, (len(y),), device="cpu")
    lengths = lengths.sort(descending=True).values if step % 2 else lengths
    rows = [table[torch.randint(9, (length,))] for length in lengths.tolist()]
    packed = rnn.pack_padded_sequence(rnn.pad_sequence(rows), lengths, enforce_sorted=bool(step % 2))
    scores, steps = model(packed, torch.ones(len(y), 1))
    padded, found = rnn.pad_packed_sequence(steps)
    assert found.tolist() == lengths.tolist() and steps.batch_sizes.device.type == "cpu"
    loss = F.cross_entropy(scores, y) + padded.square().sum() / 50
    update(optimizer, loss)
RESULT["steps"], RESULT["sizes"] = steps.data, steps.batch_sizes
RESULT["order"], RESULT["state"] = steps.sorted_indices, [table, model.state_dict()]
"""
COPIES = """
import copy

def forward(self, x, y):
    found = []
    for row, label in zip(x.split(1), y.split(1)):
        fast = copy.deepcopy(self.net)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        with torch.enable_grad():
            F.cross_entropy(fast(row), label).backward()
        inner.step()
        pull = sum((p - q.detach()).square().sum() for p, q in zip(self.net.parameters(), fast.parameters()))
        found.append(pull + F.cross_entropy(fast(row), label))
    return torch.stack(found)

model = Net(forward, net=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    loss = model(x, y).mean()
    update(optimizer, loss)
RESULT["state"] = model.state_dict()
"""
CHECKED = """
from collections import namedtuple

class Batch(namedtuple("Batch", "rows classes")):
    def __new__(cls, rows):
        assert rows.dtype == torch.float64
        return super().__new__(cls, rows, rows[:, :3].argmax(1))

class Sides(list):
    def __init__(self, left, right, /):
        super().__init__([left * 2, right])
        self.scale = 3

class Fixed(dict):
    def __init__(self, rows):
        super().__init__(rows=rows)

    def __setitem__(self, name, value):
        raise TypeError("fixed")

def forward(self, batch, sides, fixed):
    loss = F.cross_entropy(self.layer(batch.rows), batch.classes, reduction="none")
    rows = Fixed(fixed["rows"] * loss[:, None])
    return type(batch)(batch.rows * loss[:, None]), Sides(sides[0] * sides.scale, sides[1]), rows

model = Net(forward, layer=nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    batch, sides, fixed = model(Batch(x), Sides(x, x), Fixed(x))
    assert (type(batch), type(sides), sides.scale, type(fixed)) == (Batch, Sides, 3, Fixed)
    loss = (batch.rows + sides[0] + sides[1] + fixed["rows"]).square().mean()
    update(optimizer, loss)
RESULT["state"] = model.state_dict()
"""
FORCES = """
def forward(self, x):
    x = x.detach().requires_grad_()
    energy = self.net(x)[:, 0]
    return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]

model = Net(forward, net=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, _ in batches():
    energy, forces = model(x)
    update(optimizer, (energy - x.square().sum(1)).square().mean() + (forces - 2 * x).square().mean())
RESULT["state"] = model.state_dict()
"""
PENALTY = """
layers = nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.SiLU(), nn.Linear(8, 1)
model = Net(lambda self, x: self.net(x), net=nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, _ in batches():
    energy = model(x.requires_grad_())
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    update(optimizer, (energy - 1).square().mean() + (slope - 2 * x.detach()).square().mean())
RESULT["state"] = model.state_dict()
"""
SCRIPTS = {
    "forces": FORCES,
    "forces by the loop": PENALTY,
    "packed sequences": PACKED.replace("WRAP", ""),
    "copies of its modules": COPIES,
    "containers with checks": CHECKED,
    "structures": STRUCTURES,
    "gan": GAN,
    "mean over labels": LOSS_INSIDE.format(count="None"),
    "sum by a count": LOSS_INSIDE.format(count="int((labels[:, 1:] != -100).sum())"),
}


@pytest.fixture
def train(worlds, tmp_path):
    """`train(n, body, …)`: the outcomes of a script on n processes."""
    return trainer(worlds, tmp_path, PRELUDE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plain_loop_ends_in_the_same_bits_on_all_devices_and_in_the_values_of_the_loop_alone(train, name):
    (plain,) = train(1, SCRIPTS[name], num_microbatches=1)
    assert not plain.error, plain.message
    (reference,) = train(1, SCRIPTS[name])
    assert not reference.error, reference.message
    assert reference.chunks
    outcomes = train(3, SCRIPTS[name])
    assert all(outcome.result == reference.result for outcome in outcomes), outcomes[0].message
    assert sorted(chunk for outcome in outcomes for chunk in outcome.chunks) == sorted(reference.chunks)
    check_close(reference.result, plain.result, rtol=1e-8, atol=1e-10)  # another sum


def test_a_dataparallel_cuts_packed_sequences_as_a_plain_script_does(train):
    (plain,) = train(1, SCRIPTS["packed sequences"])
    for n in (1, 3):
        wrapped = train(n, PACKED.replace("WRAP", "nn.DataParallel"))
        assert not wrapped[0].error, wrapped[0].message
        assert [list(outcome.result.values()) for outcome in wrapped] == [list(plain.result.values())] * n


KEEPING = """
class Inner(nn.Linear):
    def forward(self, x):
        WRITE_INNER
        return super().forward(x)

def forward(self, x):
    z = self.body(x)
    WRITE
    return self.head(z)

model, found = Net(forward, body=Inner(6, 8), head=nn.Linear(8, 3), kept=torch.zeros(0, 8), calls=0), []
model.register_buffer("bank", torch.zeros(0, 8))
model.register_buffer("same", torch.zeros(()))
REGISTER
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    update(optimizer, loss)
RESULT["kept"] = [READ]
RESULT["state"] = model.state_dict()
"""
HOOK = "model.body.register_forward_hook(lambda module, inputs, output: found.append(output.detach()))"
KEPT = {
    "a queue in a buffer": ("self.bank = torch.cat([z.detach(), self.bank])[:20]", "", "model.bank", "bank"),
    "a buffer in place": ("self.same.copy_(z.detach().mean())", "", "model.same", "same"),
    "an attribute": ("self.kept = z.detach()", "", "model.kept", "kept"),
    "an auxiliary loss": ("self.aux = z.square().mean()", "", "model.aux.detach()", "aux"),
    "a counter": ("self.calls += 1", "", "torch.tensor(model.calls)", "calls"),
    "of a child": ("", "self.seen = x.detach()", "model.body.seen", "body.seen"),
    "a hook of a child": ("", "", "*found", ""),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_module_that_keeps_what_depends_on_the_batch_is_called_whole_and_a_line_says_why(train, name):
    write, inner, read, attribute = KEPT[name]
    body = KEEPING.replace("WRITE_INNER", inner or "pass").replace("WRITE", write or "pass").replace("READ", read)
    body = body.replace("REGISTER", "" if attribute else HOOK)
    (alone,) = train(1, body, num_microbatches=1)
    assert not alone.error, alone.message
    why = f"its forward writes {attribute}, which" if attribute else "a hook of the script's is on its body"
    for n in (1, 2):
        outcomes = train(n, body)
        assert not outcomes[0].error, outcomes[0].message
        assert all(outcome.result == alone.result for outcome in outcomes)
        assert f"model (Net) is called whole on one device: {why}" in outcomes[0].stderr


IN_PLACE = """
def forward(self, x, mask):
    WRITE
    return self.layer(x * mask)

model, mask = Net(forward, layer=nn.Linear(6, 3)), torch.ones(1, 6)
optimizer, RESULT["seen"] = torch.optim.SGD(model.parameters(), lr=0.5), []
for x, y in batches():
    update(optimizer, F.cross_entropy(model(x, mask), y))
    RESULT["seen"] += [x.clone(), mask.clone()]
"""


@pytest.mark.parametrize("write", ["mask.mul_(0.9)", "x.mul_(0.9)"])
def test_a_module_that_writes_to_an_argument_in_place_is_called_whole_and_the_script_sees_the_write(train, write):
    body = IN_PLACE.replace("WRITE", write)
    (alone,) = train(1, body, num_microbatches=1)
    for n in (1, 2):
        outcomes = train(n, body)
        assert all(outcome.result == alone.result for outcome in outcomes)
        assert "its forward writes to an argument, and microbatches have copies of it" in outcomes[0].stderr


WRITING = """
def forward(self, x):
    with torch.no_grad():
        WRITE
    return self.layer(torch.tanh(self.body(x)))

model = Net(forward, body=nn.Linear(6, 4).requires_grad_(False), layer=nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.5)
for x, y in batches():
    update(optimizer, F.cross_entropy(model(x), y))
RESULT["state"] = model.state_dict()
"""


@pytest.mark.parametrize(
    "write",
    [
        "self.body.weight.data.mul_(0.9)",
        "self.body.weight.data = self.body.weight.data * 0.9",
        "self.body.weight = nn.Parameter(self.body.weight * 0.9, requires_grad=False)",
    ],
)
def test_a_module_that_writes_to_a_parameter_is_called_whole_and_has_written_it_once_a_forward(train, write):
    body = WRITING.replace("WRITE", write)
    (alone,) = train(1, body, num_microbatches=1)
    assert not alone.error, alone.message
    for n in (1, 2):
        outcomes = train(n, body)
        assert not outcomes[0].error, outcomes[0].message
        assert all(outcome.result == alone.result for outcome in outcomes)
        assert "is called whole on one device: its forward writes body.weight" in outcomes[0].stderr


HOLDERS = {
    "a dict": ('{"x": x}', 'batch["x"]', 'batch["hidden"]'),
    "a dataclass": ("Batch(x)", "batch.x", "batch.hidden"),
    "a dict of attributes": ("Attributes(x=x)", "batch.x", "batch.hidden"),
    "a list": ("[x, None]", "batch[0]", "batch[1]"),
    "an object beside them": ("(x, Held())", "batch[0]", "batch[1].hidden"),
}
HOLDING = """
class Attributes(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self

@dataclass
class Batch:
    x: torch.Tensor
    hidden: torch.Tensor = None

class Held:
    pass

def forward(self, batch):
    hidden = torch.tanh(self.body(GIVEN))
    if WRITES:
        KEPT = hidden
    return self.layer(hidden)

model = Net(forward, body=nn.Linear(6, 4), layer=nn.Linear(4, 3))
optimizer, count = torch.optim.SGD(model.parameters(), lr=0.5), 0
for x, y in batches():
    batch = MADE
    loss = F.cross_entropy(model(batch), y)
    update(optimizer, loss + KEPT.square().mean() if WRITES else loss)
    count += 1
RESULT["state"] = model.state_dict()
"""


@pytest.mark.parametrize("writes", ["True", "False", "count > 1"])
@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_forward_writes_to_an_argument_the_script_finds_there_or_it_is_refused(train, name, writes):
    made, given, kept = HOLDERS[name]
    body = HOLDING.replace("MADE", made).replace("GIVEN", given).replace("KEPT", kept).replace("WRITES", writes)
    (alone,) = train(1, body, num_microbatches=1)
    for n in (1, 2):
        outcomes = train(n, body)
        if writes == "count > 1":
            assert outcomes[0].error == "DeterminismError", outcomes[0]
            assert "an argument was written inside the wrapped forward" in outcomes[0].message
            continue
        assert not outcomes[0].error, outcomes[0].message
        assert ("its forward writes to an argument" in outcomes[0].stderr) == (writes == "True")
        for outcome in outcomes:
            check_close(outcome.result, alone.result)


OF_ITS_ARGUMENTS = """
def forward(self, x, draws):
    return self.layer(x + torch.randn(x.shape, generator=draws))

model, draws = Net(forward, layer=nn.Linear(6, 3)), torch.Generator().manual_seed(5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    update(optimizer, F.cross_entropy(model(x, draws), y))
RESULT["next"] = torch.rand(2, generator=draws)
"""


@cpu_only("a generator of the host")
def test_a_generator_among_the_arguments_is_seeded_for_each_microbatch(train):
    (alone,) = train(1, OF_ITS_ARGUMENTS)
    assert not alone.error, alone.message
    assert all(outcome.result == alone.result for outcome in train(2, OF_ITS_ARGUMENTS))
    assert "Warning" not in alone.stderr


RECORDED = """
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    update(optimizer, F.cross_entropy(model(x), y))
recorded = torch.jit.trace(model, x)
RESULT["recorded"], RESULT["layers"] = recorded(x), str(recorded.graph).count("Linear")
"""


def test_what_records_a_module_records_its_own_operations(train):
    (alone,) = train(1, RECORDED, num_microbatches=1)
    assert alone.result["/layers"] > 0
    for n in (1, 2):
        (first, *_) = train(n, RECORDED)
        assert not first.error, first.message
        assert first.result["/layers"] == alone.result["/layers"]


HOOKED = """
def forward(self, x):
    hidden = torch.tanh(self.body(x))
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: print(len(gradient), f"{gradient.sum():.9f}"))
    return self.layer(hidden)

model = Net(forward, body=nn.Linear(6, 4), layer=nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    update(optimizer, F.cross_entropy(model(x), y))
    print("step")
"""


@cpu_only("a GPU's backward runs on a thread of its own")
def test_what_a_backward_prints_comes_in_the_order_of_the_microbatches(train):
    said = [train(n, HOOKED)[0].stdout for n in (1, 2, 3)]
    assert [line.split()[0] for line in said[0].splitlines()] == ["4", "4", "4", "2", "step"] * 3
    assert said[1:] == said[:1] * 2


def test_a_module_that_begins_to_write_to_what_every_microbatch_gets_whole_is_refused(train):
    body = IN_PLACE.replace("WRITE", "mask.mul_(0.9) if mask[0, 0] > 1 else None")
    body += '    mask = mask + (len(RESULT["seen"]) > 2)'
    for n in (1, 2):
        outcome = train(n, body)[0]
        assert outcome.error == "DeterminismError", outcome
        assert "an argument was written inside the wrapped forward" in outcome.message


def test_what_a_module_writes_alike_for_every_batch_hinders_no_microbatches(train):
    body = KEEPING.replace("WRITE_INNER", "pass").replace("WRITE", "self.same += 1; self.calls = 0")
    body = body.replace("REGISTER", "").replace("READ", "model.same")
    (alone,), (reference,) = train(1, body, num_microbatches=1), train(1, body)
    assert reference.chunks
    kept = [path for path in alone.result if "kept" in path]
    assert kept
    assert [reference.result[path] for path in kept] == [alone.result[path] for path in kept]
    assert [outcome.result for outcome in train(2, body)] == [reference.result] * 2


def test_dropout_is_that_of_the_microbatch_on_all_devices(train):
    body = STRUCTURES.replace("torch.tanh(self.body(batch", "F.dropout(self.body(batch")
    results = [train(n, body)[0] for n in (1, 3)]
    assert not results[0].error, results[0].message
    assert results[0].result == results[1].result
    alone = train(1, body, num_microbatches=1)[0].result
    assert results[0].result != alone, "masks are those of the microbatches"


def test_one_line_says_which_module_is_shared_out_and_what_becomes_of_batchnorm(train):
    body = """
    model = nn.Sequential(nn.Linear(6, 4), nn.{norm}, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(2, {rows}):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    """
    shared = train(2, dedent(body).format(norm="BatchNorm1d(4)", rows=12), num_microbatches=None)[0]
    assert shared.stderr == (
        "samestep: model (Sequential), which an optimizer trains, is shared out in 2 microbatches, by 2 devices: "
        "this process and 1 worker; "
        "--logical-devices 2 gives the same bits on any number of devices; BatchNorm normalises by each microbatch, "
        "and its running statistics are the mean over them\n"
    )
    (alone,) = train(1, dedent(body).format(norm="LayerNorm(4)", rows=12), num_microbatches=3)
    assert alone.stderr == "samestep: model (Sequential), which an optimizer trains, is shared out in 3 microbatches\n"
    for n in (1, 2):
        row = train(n, dedent(body).format(norm="LayerNorm(4)", rows=1))[0]
        assert row.stderr.startswith("samestep: model (Sequential) got a batch of 1 row, and is not shared out: one ")
        assert row.stderr.count("\n") == 1
        assert row.chunks == ()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_script_without_gradients_runs_as_it_is_and_says_so_unless_its_dataparallel_is_shared_out(train, is_wrapped):
    model = "nn.DataParallel(nn.Linear(6, 3))" if is_wrapped else "nn.Linear(6, 3)"
    body = f"model = {model}\nfor x, _ in batches():\n    with torch.no_grad():\n        print(model(x).shape)\n"
    for n in (1, 2):
        outcomes = train(n, body)
        assert outcomes[0].stdout == "torch.Size([14, 3])\n" * 3
        assert ("computed no gradients: no forward was shared out" in outcomes[0].stderr) is not is_wrapped
        assert any(outcome.chunks for outcome in outcomes) is is_wrapped


FROZEN = """
backbone, head = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 8)), nn.Linear(8, 3)
SCRIPT
for step, (x, y) in enumerate(batches(4)):
    CHANGE
    loss = F.cross_entropy(CALL, y)
    update(optimizer, loss)
RESULT["state"] = [backbone.state_dict(), head.state_dict()]
"""
WHOLE = "model = nn.Sequential(backbone, nn.ReLU(), head)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.5)\n"
PARTS = "optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.5)\n"
FREEZE = "backbone.requires_grad_(False)\n"
THAW = "backbone.requires_grad_(step > 1)"


@pytest.mark.parametrize(
    ("script", "call", "change", "num_shared"),
    [
        (FREEZE + WHOLE, "model(x)", "", 4),
        (FREEZE + PARTS, "head(backbone(x))", "", 4),  # the head alone is trained
        (PARTS, "head(backbone(x))", THAW, 6),  # at first; then the backbone has most
    ],
)
def test_a_module_whose_optimizer_has_frozen_parameters_too_is_shared_out(train, script, call, change, num_shared):
    body = FROZEN.replace("SCRIPT", script).replace("CALL", call).replace("CHANGE", change)
    (alone,), (reference,) = train(1, body, num_microbatches=1), train(1, body)
    assert len(reference.chunks) == 4 * num_shared, reference.stderr
    check_close(reference.result, alone.result, rtol=1e-8, atol=1e-10)
    for outcome in train(3, body):
        assert outcome.result == reference.result


REFUSED = {
    "a loss over pairs": (
        "x = F.normalize(self.layer(x), dim=1)\n    return F.cross_entropy(x @ x.T, torch.arange(len(x)))",
        "neither their sum nor their mean",
    ),
    "a statistic over the batch": ("return self.layer(x - x.mean(0))", "rows depend on each other"),
    "a batch along another dim": ("return self.layer(x).cumsum(0)", "the batch lies along another dim"),
    "a fixed batch": ("return self.layer(x.view(14, 6))", "on a microbatch it raises RuntimeError"),
    "a number of the batch": ("return self.layer(x), len(x)", "depends on the microbatch"),
}
ADVISED = {
    "pictures": (
        "nn.Conv2d(3, 2, 3)",
        "torch.stack([self.layer(picture[None]).sum() for picture in inputs[0]])",
        "[torch.randn(3, size, 8) for size in (5, 6, 7)], torch.ones(4)",
        "A list of 3 with tensors is cut by the rows of these",
        'samestep.DataParallel(model, scatter="elements")',
    ),
    "a hidden state": (
        "nn.GRU(6, 4, 2, batch_first=True)",
        "self.layer(*inputs)[0]",
        "torch.randn(8, 5, 6), torch.zeros(2, 8, 4)",
        "[2, 8, 4] g",  # goes to every microbatch whole, or gives 2
        "must be passed as [batch, layers, hidden] and transposed inside the forward",
    ),
}


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("name", ADVISED)
def test_an_error_of_a_microbatch_names_the_argument_that_is_no_batch_and_what_to_do_about_it(train, name, is_wrapped):
    layer, forward, inputs, *texts = ADVISED[name]
    body = f"""
model = {"nn.DataParallel" if is_wrapped else ""}(Net(lambda self, *inputs: {forward}, layer={layer}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model({inputs}).sum().backward()
"""
    for n in (1, 2):
        outcome = train(n, body)[0]
        assert outcome.error == "UsageError", outcome
        assert all(text in outcome.message for text in texts), outcome.message
        assert len(outcome.message) < 900


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_needs_the_whole_batch_is_refused_by_name_before_it_trains(train, name):
    forward, reason = REFUSED[name]
    body = f"def forward(self, x):\n    {forward}\n\nfit(Net(forward, layer=nn.Linear(6, 3)))"
    for n in (1, 2):
        for outcome in train(n, body):
            assert outcome.error == "UsageError", outcome.result
            assert outcome.message.startswith("model (Net) cannot be shared out: ")
            assert reason in outcome.message
            assert "--logical-devices 1" in outcome.message
    assert not train(2, body, num_microbatches=1)[0].error, "the fix that the message names"


def test_a_result_that_has_no_rows_for_a_single_sample_is_refused(train):
    body = "fit(Net(lambda self, x: self.layer(x).squeeze(), layer=nn.Linear(6, 1)))"
    (outcome,) = train(1, body, num_microbatches=14)
    assert outcome.error == "UsageError", outcome.message
    assert outcome.message.startswith("model (Net) cannot be shared out: ")


class Tokens(nn.Module):
    def __init__(self, ignored=-100):
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.ignored = ignored

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(x).view(-1, 5), labels.view(-1), ignore_index=self.ignored)


def loss_of_tokens(is_shared):
    torch.manual_seed(3)
    model, x, labels = Tokens(), torch.randn(8, 4, 6), torch.randint(5, (8, 4))
    labels[:3, 1:] = -100
    if not is_shared:
        return model(x, labels)
    with shared_out(alone(), None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(x, labels)
        loss.backward()
    assert optimizer.param_groups
    return loss


def test_twin_a_mean_of_means_is_another_loss_and_no_rule_that_the_comparison_accepts(monkeypatch):
    plain = loss_of_tokens(False)
    torch.testing.assert_close(loss_of_tokens(True), plain)
    monkeypatch.setattr(compare.Rule, "weights", lambda rule, chunks: [1] * chunks.num_chunks)
    with pytest.raises(UsageError, match="neither their sum nor their mean"):
        loss_of_tokens(True)


@pytest.mark.parametrize("ignored", [-100, -1])
def test_a_mean_over_labels_has_the_right_gradients_where_the_loss_of_every_microbatch_is_the_same(ignored):
    def gradient(is_shared):
        torch.manual_seed(3)
        model, x, labels = Tokens(ignored), torch.randn(8, 4, 6), torch.randint(5, (8, 4))
        labels[:3, 1:] = ignored
        nn.init.zeros_(model.head.weight)  # as last layers often begin: all classes are alike
        nn.init.zeros_(model.head.bias)
        with shared_out(alone(), None) if is_shared else nullcontext():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x, labels).backward()
        assert optimizer.param_groups
        assert not any(parameter.any() for parameter in model.parameters())
        return model.head.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))


def test_the_comparison_leaves_no_trace():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return nn.functional.dropout(self.norm(self.layer(x)))

    def trained(compared):
        torch.manual_seed(5)
        script, model, seen = alone(), Net(), []
        model.register_forward_hook(lambda *_: seen.append(1))
        with shared_out(script, None):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                if step or compared:
                    model(torch.ones(8, 6)).sum().backward()
                    optimizer.step()
        return script.chunks_run, len(seen), model.norm.num_batches_tracked.item(), torch.rand(2).tolist()

    torch.manual_seed(5)
    Net()
    chunks, hooked, tracked, drawn = trained(True)
    assert (len(chunks), hooked, tracked) == (8, 2, 2)
    assert drawn == trained(False)[3], "wrapped forwards and comparisons restore the generators"


def test_a_module_that_shares_a_part_of_itself_out_is_left_to_that(train):
    forward = "lambda self, x: nn.parallel.data_parallel(self.main, x, [0, 1]).sum(0, keepdim=True)"
    body = f"fit(Net({forward}, main=nn.Linear(6, 3)))"
    (outcome,) = train(1, body)
    assert not outcome.error, outcome.message
    assert len(outcome.chunks) == 12
    assert outcome.stderr == ""


TRANSFORMERS = """
import torch, transformers
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

torch.manual_seed(1)
RESULT = {{"losses": []}}
if "{name}" == "gpt2":
    size = {{"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, bos_token_id=1, eos_token_id=1, **size, **drops))
else:
    size = {{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    model = BertForMaskedLM(BertConfig(vocab_size=50, max_position_embeddings=16, **size, **drops))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    ids = torch.randint(50, (7, 12))
    mask = (torch.arange(12) < torch.randint(3, 13, (7, 1))).long() if step else torch.ones_like(ids)
    labels = ids.masked_fill(mask == 0, -100)
    options = {options}
    output = model(input_ids=ids, attention_mask=mask, labels=labels, **options)
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    RESULT["losses"].append(output.loss.item())
RESULT["kind"] = (type(output).__name__, tuple(output.logits.shape))
"""
ITEMS = '{"num_items_in_batch": (labels[:, 1:] != -100).sum()}'


@pytest.mark.parametrize(("name", "options"), [("gpt2", ITEMS), ("bert", "{}")])
def test_losses_that_models_of_transformers_return_are_those_of_the_whole_batch(train, name, options):
    pytest.importorskip("transformers")
    body = TRANSFORMERS.format(name=name, options=options)
    (plain,), *shared = (train(n, body, num_microbatches=count, prelude="") for n, count in ((1, 1), (1, 3), (2, 3)))
    assert not plain.error, plain.message
    assert len(shared[0][0].chunks) == 9, shared[0][0].message
    for outcomes in shared:
        assert all(outcome.result == shared[0][0].result for outcome in outcomes), outcomes[0].message
    check_close(shared[0][0].result, plain.result, rtol=1e-5, atol=1e-6)  # float32, another sum
