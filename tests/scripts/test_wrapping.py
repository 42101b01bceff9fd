"""Scripts that wrap nothing: a module is shared out by its name, or a hint says that one could be."""

from textwrap import dedent

import pytest
import torch
from adopting import Bits, run
from torch import nn
from tutorial_programs import run_script

from samestep.comm.communicator import Communicator
from samestep.comm.transport import LocalTransport
from samestep.errors import DeterminismError, UsageError
from samestep.scripts import wrapping
from samestep.scripts.adoption import Adoption
from samestep.scripts.parallel import DataParallel
from samestep.scripts.wrapping import wrapped

STEPS = 3
PRELUDE = """
import hashlib
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))

def digest(module):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()

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
COMPILED = """
model = Net()
fast = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in batches():
    step(fast, nn.CrossEntropyLoss(), optimizer, x, y)
RESULT = digest(model)
"""
FROM_SCRATCH = """
import samestep
from samestep.scripts.tutorial_api import allreduce, replicate_params, split_and_load
replicas = replicate_params(list(Net().parameters()), 4)
for x, y in batches():
    for (x, y), (w, b, *_) in zip(split_and_load((x, y), 4), replicas):
        (x @ w.T + b).sum().backward()
    allreduce([[p.grad for p in replica[:2]] for replica in replicas])
"""


@pytest.fixture
def script(tmp_path):
    def write(body):
        path = tmp_path / "train.py"
        path.write_text(dedent(PRELUDE + body))
        return path

    return write


def alone(num_microbatches=4):
    transport = LocalTransport()
    return Adoption(Communicator(torch.device("cpu"), transport, transport), num_microbatches)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (PLAIN, "model"),
        (PLAIN, "net"),
        (PLAIN, "Net"),
        (IN_A_FUNCTION, "network"),
        (IN_A_FUNCTION, "net"),
        (IN_A_CLASS, "trainer.model"),
        (IN_A_CLASS, "self.model"),
        (IN_A_CLASS, "Net"),
    ],
)
def test_the_named_module_is_shared_out_and_ends_in_the_same_bits(worlds, script, body, name):
    path = script(body)
    (reference,) = worlds(1).run(run_script, path, name)
    assert reference["error"] is None
    assert len(reference["chunks"]) == STEPS * 4
    for world_size in (2, 3):
        results = worlds(world_size).run(run_script, path, name)
        assert [result["error"] for result in results] == [None] * world_size
        assert {result["result"] for result in results} == {reference["result"]}
        ran = [chunk for result in results for chunk in result["chunks"]]
        assert sorted(ran) == sorted(reference["chunks"]), "each chunk runs once"


def test_twin_a_script_that_is_not_shared_out_is_noticed(worlds, script):
    results = worlds(2).run(run_script, script(PLAIN), None)
    assert [result["chunks"] for result in results] == [[], []]
    assert results[0]["result"] != worlds(1).run(run_script, script(PLAIN), "model")[0]["result"]


def test_only_calls_of_the_named_module_are_shared_out(worlds, script):
    body = """
    model, other = Net(), Net()
    x = torch.randn(12, 6)
    other(x), other.body(x), model.body(x)
    sizes = [module(x).shape[0] for module in (model, other)]
    """
    (result,) = worlds(1).run(run_script, script(dedent(body)), "model")
    assert result["error"] is None
    assert len(result["chunks"]) == 4


def test_a_compiled_module_goes_by_the_name_of_either(worlds, script):
    plain = worlds(1).run(run_script, script(PLAIN), "Net")[0]["result"]
    for name in ("model", "fast", "Net"):
        (result,) = worlds(1).run(run_script, script(COMPILED), name)
        assert result["error"] is None
        assert len(result["chunks"]) == STEPS * 4
        assert result["result"] == plain


def test_with_one_microbatch_the_module_is_simply_called(worlds, script):
    (plain,) = worlds(1).run(run_script, script(PLAIN), None)
    (result,) = worlds(1).run(run_script, script(PLAIN), "model", 1)
    assert result["error"] is None
    assert result["chunks"] == []
    assert result["result"] == plain["result"]


def test_a_module_that_is_wrapped_already_is_left_to_its_wrapper(worlds, script):
    body = "model = nn.DataParallel(nn.Linear(6, 2))\nRESULT = model(torch.ones(4, 6)).shape[0]\n"
    (result,) = worlds(1).run(run_script, script(body), "model")
    assert result["error"] is None
    assert result["result"] == 4
    assert result["chunks"] == []


@pytest.mark.parametrize("ending", ["", "import sys\nsys.exit()\n", "raise SystemExit(0)\n"])
def test_a_name_that_was_never_called_is_an_error_that_lists_what_was(worlds, script, ending):
    for result in worlds(2).run(run_script, script(PLAIN + ending), "modle"):
        assert result["error"].startswith("UsageError: got --wrap modle, and the script called no module of that name.")
        assert "called: net (Net), criterion (CrossEntropyLoss). Give" in result["error"]


def test_what_was_called_is_named_as_an_attribute_where_no_variable_holds_it(worlds, script):
    (result,) = worlds(1).run(run_script, script(IN_A_CLASS), "model")
    assert "called: self.model (Net), self.criterion (CrossEntropyLoss)." in result["error"]
    (result,) = worlds(1).run(run_script, script("nn.ReLU()(torch.ones(3))\n"), "model")
    assert "called: ReLU." in result["error"]
    (result,) = worlds(1).run(run_script, script("RESULT = 1\n"), "model")
    assert "called: none." in result["error"]


@pytest.mark.parametrize(
    ("ending", "error"), [("raise KeyError('x')\n", "KeyError: 'x'"), ("raise SystemExit(3)\n", "SystemExit: 3")]
)
def test_a_script_that_fails_before_the_name_is_met_keeps_its_own_error(worlds, script, ending, error):
    assert worlds(1).run(run_script, script(ending), "model")[0]["error"] == error


@pytest.mark.parametrize("name", ["", "my model", "model.", "1x", "model[0]", "model:", "model:x", "model:1.0", ":1"])
def test_what_can_be_no_name_is_refused(name):
    with pytest.raises(UsageError, match="give a variable or class of the script"), wrapped(alone(), name):
        pass


def test_modules_inside_a_chunk_are_called_without_a_look_at_the_stack(monkeypatch):
    adoption = alone()
    looked = []
    real = wrapping._is_meant
    monkeypatch.setattr(wrapping, "_is_meant", lambda *args: looked.append(args) or real(*args))
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3))
    with wrapped(adoption, "model"):
        model(torch.ones(8, 6))
    assert len(adoption.chunks_run) == 4
    assert len(looked) == 1


def test_a_name_means_the_local_where_there_is_one_and_it_is_bound(worlds, script):
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
    for call in ("hides(other)", "hides(model)", "binds_late()", "holds()"):
        (result,) = worlds(1).run(run_script, script(dedent(body).format(call=call)), "model")
        assert result["error"] is None
        assert len(result["chunks"]) == 4, call
    (result,) = worlds(1).run(run_script, script(dedent(body).format(call="other(x)")), "model")
    assert "called: other (Net)." in result["error"]


@pytest.mark.parametrize(
    ("body", "name"), [(PLAIN, "model"), (IN_A_FUNCTION, "network"), (IN_A_CLASS, "trainer.model")]
)
def test_a_script_that_wraps_nothing_is_told_once_what_it_could_wrap(worlds, script, body, name):
    results = worlds(2).run(run_script, script(body), None, None, True)
    said = results[0]["said"]
    assert said.count("wraps no model: all 2 processes compute the same.") == 1
    assert f"samestep run --wrap {name} train.py …" in said
    assert results[1]["said"] == ""
    for result in worlds(2).run(run_script, script(body), name, 4, True):
        assert result["error"] is None, "the name that is proposed is one that works"


def test_the_hint_names_the_largest_model(worlds, script):
    body = "small = nn.Linear(2, 2)\nlarge = nn.Linear(50, 50)\nsmall(torch.ones(1, 2)).sum().backward()\n"
    assert "--wrap large train.py" in worlds(2).run(run_script, script(body), None, None, True)[0]["said"]


def test_without_a_model_the_hint_names_none(worlds, script):
    body = "w = torch.ones(2, requires_grad=True)\nw.sum().backward()\n"
    said = worlds(2).run(run_script, script(body), None, None, True)[0]["said"]
    assert "samestep run --wrap NAME" in said
    assert "NAME is a variable or class of the script" in said


def test_a_wrapper_for_one_device_is_told_about_the_number_of_microbatches(worlds, script):
    body = "model = nn.DataParallel(nn.Linear(6, 2))\nmodel(torch.ones(4, 6)).sum().backward()\n"
    said = worlds(2).run(run_script, script(body), None, None, True)[0]["said"]
    assert "wraps model for one device: all 2 processes compute the same" in said
    assert "samestep run --num-microbatches 2" in said


@pytest.mark.parametrize(
    ("world_size", "body", "wrap"), [(1, PLAIN, None), (2, PLAIN, "model"), (2, FROM_SCRATCH, None)]
)
def test_no_hint_where_all_is_well(worlds, script, world_size, body, wrap):
    result = worlds(world_size).run(run_script, script(body), wrap, 4, True)[0]
    assert result["error"] is None
    assert result["said"] == ""


def test_a_subclass_of_samesteps_own_wrapper_with_parts_of_its_own_is_refused_by_name():
    class Own(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            raise AssertionError("not reached")

    with pytest.raises(UsageError, match=r"Own overrides DataParallel\.scatter"):
        Own(nn.Linear(2, 1))(torch.ones(4, 2))


ON_THE_HOST = """
    class Net(nn.Linear):
        def forward(self, x):
            print("inside", x.device, self.weight.device, x.numpy().shape)
            return super().forward(x)

    torch.manual_seed(2)
    model = Net(3, 2){cuda}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        y = model(torch.ones(8, 3){cuda})
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(y.device, loss.device, model.weight.grad.device)
    RESULT = {{"y": y.detach().{numpy}, "weight": model.weight}}
"""


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_model_on_the_cpu_has_its_inputs_and_outputs_there(worlds, script, tmp_path, n):
    path = script(dedent(ON_THE_HOST).format(cuda="", numpy="numpy().tolist()"))
    outcomes = run(worlds, n, path, cwd=tmp_path, wrap="model")
    assert [outcome.error for outcome in outcomes] == [""] * n, outcomes[0].message
    assert outcomes[0].stdout == "inside cpu cpu (2, 3)\n" * 8 + "cpu cpu cpu\n"
    assert outcomes[0].result == run(worlds, 1, path, cwd=tmp_path, wrap="model")[0].result
    assert sum(len(outcome.chunks) for outcome in outcomes) == 8


def test_a_model_on_a_device_has_its_inputs_and_outputs_there(worlds, script, tmp_path):
    body = dedent(ON_THE_HOST).format(cuda='.to("cuda:1")', numpy="cpu().tolist()").replace(", x.numpy().shape", "")
    (outcome,) = run(worlds, 1, script(body), cwd=tmp_path, wrap="model")
    assert outcome.stdout == "inside cuda:1 cuda:1\n" * 8 + "cuda:1 cuda:1 cuda:1\n", outcome.message


def test_a_model_on_the_cpu_is_refused_where_the_run_is_on_gpus():
    transport = LocalTransport()
    adoption = Adoption(Communicator(torch.device("cuda"), transport, transport), 4)
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="model is on the CPU and the run on cuda"), wrapped(adoption, "model"):
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


def test_batches_along_another_dim_give_what_the_script_alone_gives(worlds, script, tmp_path):
    path = script(dedent(TIME_MAJOR))
    (whole,) = run(worlds, 1, path, 1, cwd=tmp_path, wrap="model")
    results = [run(worlds, n, path, cwd=tmp_path, wrap="model:1") for n in (1, 2, 3)]
    for outcomes in results:
        assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), outcomes[0].message
        assert all(outcome.result == results[0][0].result for outcome in outcomes)
        assert sum(len(outcome.chunks) for outcome in outcomes) == 9, (
            "six sequences over four microbatches are three chunks"
        )
    for path, value in whole.result.items():
        ours = results[0][0].result[path]
        assert isinstance(value, Bits)
        torch.testing.assert_close(ours.tensor(), value.tensor(), rtol=1e-9, atol=1e-12, msg=path)  # another sum


def test_inputs_that_do_not_split_alike_are_told_about_the_dim(worlds, script, tmp_path):
    for outcome in run(worlds, 2, script(dedent(TIME_MAJOR)), cwd=tmp_path, wrap="model"):
        assert outcome.error == "UsageError"
        assert "--wrap NAME:DIM" in outcome.message


def test_inputs_of_different_sizes_are_told_once_how_they_are_cut(worlds, script):
    body = """
    class Net(nn.Module):
        def forward(self, x, hidden):
            return x.sum() + hidden.sum()

    model = Net()
    for _ in range(2):
        model(torch.ones(35, 20), torch.ones({rows}, 20))
    """
    text = (
        "samestep: --wrap model cuts inputs of shape [35, 20], [4, 20] along dim 0 into 4 microbatches; if their batch "
        "lies "
        "along another, name it: --wrap model:1\n"
    )
    for rows, said in ((4, text), (35, "")):
        results = worlds(2).run(run_script, script(dedent(body).format(rows=rows)), "model")
        assert [result["error"] for result in results] == [None, None]
        assert [result["said"] for result in results] == [said, ""]


@pytest.mark.parametrize(("error", "is_told"), [("ValueError", True), ("DeterminismError", False)])
def test_what_a_chunk_raises_is_followed_by_how_the_inputs_were_cut(error, is_told):
    class Policy(nn.Module):
        def forward(self, state):
            raise {"ValueError": ValueError, "DeterminismError": DeterminismError}[error](state.shape)

    model = Policy()
    with pytest.raises((ValueError, DeterminismError)) as raised, wrapped(alone(), "model"):
        model(torch.ones(4))
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) == is_told
    assert not is_told or "--wrap model cuts inputs of shape [4] along dim 0 into 4 microbatches" in notes[0]
