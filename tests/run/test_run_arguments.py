"""The run: bad arguments get a sentence that names the option; the contract holds what the bits depend on."""

import inspect
import json
from collections import Counter
from dataclasses import fields

import pytest
import torch
from train_programs import classification, classifier, points
from worlds import DEVICE, in_turns

from samestep.engine.config import StepConfig, StepOptions
from samestep.errors import DeterminismError, DeviceError, UsageError
from samestep.run.run import Run
from samestep.run.trainer import Trainer


def refusal(make, kind=UsageError):
    """The one line with which it is refused."""
    with pytest.raises(kind) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


OF_RUNS = [  # arguments of a run that cannot be, and what is said of them
    ({"global_batch_size": 0}, "got global_batch_size=0; it must be 1 or more (--global-batch-size)"),
    ({"global_batch_size": 8.0}, "got global_batch_size=8.0"),
    ({"global_batch_size": True}, "got global_batch_size=True"),
    ({"num_microbatches": 0}, "got num_microbatches=0; it must be 1 or more (--num-microbatches)"),
    ({"num_microbatches": "4"}, "got num_microbatches='4'"),
    ({"seed": -1}, "got seed=-1; it must be from 0 to 9223372036854775807 (--seed)"),
    ({"seed": 2**63}, "got seed=9223372036854775808"),
    ({"seed": 0.5}, "got seed=0.5"),
    ({"seed": None}, "got seed=None"),
    ({"num_threads": 0}, "got num_threads=0; it must be 1 or more (--num-threads)"),
    ({"num_threads": "2"}, "got num_threads='2'"),
    ({"timeout_seconds": 0}, "got timeout_seconds=0; it must be above 0"),
    ({"timeout_seconds": float("nan")}, "got timeout_seconds=nan"),
    ({"timeout_seconds": float("inf")}, "got timeout_seconds=inf"),
    ({"shares": [1, 1]}, "got 2 shares for 1 devices; needed: one number a device"),
]


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "cpu:x", 1.5])
def test_a_device_that_is_not_here_is_named(device):
    assert refusal(lambda: Run(8, device=device), DeviceError).startswith(f"got device='{device}'; this process has ")


def test_an_accelerator_of_another_kind_than_those_that_are_used_is_none(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    assert Run(8).device == torch.device("cpu")
    assert refusal(lambda: Run(8, device="xpu"), DeviceError) == "got device='xpu'; this process has cpu"


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_device_that_is_here_is_taken(device):
    assert Run(8, device=device).device == torch.device("cpu")


def test_more_devices_than_microbatches_say_what_to_set():
    text = refusal(lambda: in_turns(3, lambda c: Run(8, 2, communicator=c)))
    assert text.startswith("got 3 devices for 2 microbatches")
    assert "use num_microbatches=3 or more (--num-microbatches; " in text


OF_STEPS = [  # and of a step; a class is one of schedulers
    ({"precision": "fp16"}, "got precision='fp16'; it is one of 32-true, bf16-mixed, 16-mixed (--precision)"),
    ({"on_nonfinite": "ignore"}, "got on_nonfinite='ignore'; it is one of raise, skip"),
    ({"max_grad_norm": 0}, "got max_grad_norm=0; it must be above 0, or None for no clipping"),
    ({"max_grad_norm": float("nan")}, "got max_grad_norm=nan"),
    ({"late_check": True}, "late_check=True needs Adam or AdamW with fused=True"),
    ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau follows a measured value"),
    ({"scheduler": "cosine"}, "got a str as scheduler; needed: one of torch.optim.lr_scheduler"),
]


def step_with(scheduler=None, **options):
    """Makes a step with options."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = scheduler(optimizer) if isinstance(scheduler, type) else scheduler
    return Run(8).train_step(model, optimizer, classification, scheduler=made, **options)


def test_ranks_whose_loaders_order_datasets_of_other_lengths_are_told_so_in_the_first_step():
    def program(communicator):
        run = Run(8, 4, communicator=communicator)
        model = classifier()
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), classification)
        loader = run.loader(points(40 + communicator.rank), shuffle=True, drop_last=True)
        with pytest.raises(DeterminismError, match="dataset of rank 1 has 41 samples in step 1, rank 0's has 40"):
            step(next(iter(loader)))

    in_turns(2, program)


def test_eight_microbatches_are_the_default_whatever_the_devices():
    assert [in_turns(d, lambda c: Run(32, communicator=c).contract.num_microbatches)[0] for d in (1, 2, 5)] == [8, 8, 8]
    assert Run(3).contract.num_microbatches == 3


def test_the_contract_is_json_and_does_not_hold_the_number_of_devices():
    contracts = [in_turns(d, lambda c: Run(32, 8, 7, communicator=c).contract.as_json())[0] for d in (1, 4)]
    assert contracts[0] == contracts[1]
    contract = json.loads(json.dumps(contracts[0]))
    assert {k: contract[k] for k in ("global_batch_size", "num_microbatches", "seed", "device_kind")} == {
        "global_batch_size": 32,
        "num_microbatches": 8,
        "seed": 7,
        "device_kind": DEVICE,
    }
    assert contract["num_threads"] == 1
    assert contract["versions"]["torch"] == torch.__version__
    assert contract["flags"]["deterministic_algorithms"] is True


def test_only_the_first_rank_prints(capsys):
    def program(communicator):
        run = Run(8, 4, communicator=communicator)
        run.print("rank", run.rank, "of", run.world_size)
        return run.is_main

    assert in_turns(3, program) == [True, False, False]
    assert capsys.readouterr().out == "rank 0 of 3\n"


OTHER_NAMES = [
    (lambda run: Run(batch_size=8), "Run has no argument 'batch_size'; did you mean 'global_batch_size'?"),
    (
        lambda run: Trainer.fit(None, [1], max_epochs=3),
        "Trainer.fit has no argument 'max_epochs'; did you mean 'epochs'?",
    ),
    (lambda run: Run(8, sed=1), "Run has no argument 'sed'; did you mean 'seed'?"),
    (
        lambda run: Trainer(run, None, None, None, mixed_precision="bf16"),
        "Trainer has no argument 'mixed_precision'; did you mean 'precision'?",
    ),
    (lambda run: Run(8, xyz=1), "Run has no argument 'xyz'; it takes global_batch_size, num_microbatches, seed, "),
    (
        lambda run: run.train_step(None, None, None, gradient_clip_val=1),
        "Run.train_step has no argument 'gradient_clip_val'; did you mean 'max_grad_norm'?",
    ),
    (lambda run: run.loader([1], batch_size=3), "Run.loader has no argument 'batch_size'; it takes dataset, "),
    (lambda run: run.evaluate(None, [1], {}, forwards=1), "Run.evaluate has no argument 'forwards'; did you mean"),
    (lambda run: run.predict(None, [1], metrics={}), "Run.predict has no argument 'metrics'; it takes model, "),
    (
        lambda run: Trainer(run, None, None, None, callbacks=[]),
        "Trainer has no argument 'callbacks'; did you mean 'hooks'?",
    ),
    (
        lambda run: Trainer(run, None, None, None, lr_scheduler=1),
        "Trainer has no argument 'lr_scheduler'; did you mean 'scheduler'?",
    ),
]


def test_a_step_and_a_trainer_show_the_options_of_a_step_with_their_defaults():
    defaults = {field.name: field.default for field in fields(StepConfig)[4:]}
    assert list(StepOptions.__annotations__) == list(defaults)
    for shown in (inspect.signature(Run.train_step).parameters, inspect.signature(Trainer).parameters):
        assert {name: shown[name].default for name in defaults} == defaults


def test_a_run_shows_its_contract():
    shown = repr(Run(8, 4, seed=3, device="cpu"))
    assert shown.startswith("<samestep.Run: global_batch_size=8, num_microbatches=4, seed=3, ")
    assert shown.endswith("; rank 0 of 1, cpu>")


def gathered(communicator):
    run = Run(8, communicator=communicator)
    run.barrier()
    rank = communicator.rank
    odd = torch.full((1,) * 9, float(rank), device=run.device).to(torch.float8_e4m3fn)
    assert [float(part) for part in run.gather(odd)] == [*range(communicator.world_size)]
    return [part.tolist() for part in run.gather(torch.arange(rank + 1, device=run.device) + 10 * rank)]


def in_order(communicator, order):
    run = Run(8, communicator=communicator)
    with run.main_first():
        order.append(communicator.rank)
    run.barrier()


def failing_first(communicator):
    run = Run(8, communicator=communicator)
    with run.main_first():
        if communicator.rank == 0:
            raise FileNotFoundError("no data")
        raise AssertionError("the others do not begin")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_ranks_have_is_gathered_by_rank(world_size):
    expected = [[10 * rank + k for k in range(rank + 1)] for rank in range(world_size)]
    assert in_turns(world_size, gathered) == [expected] * world_size


def test_real_processes_gather_too(worlds):
    assert worlds(2).run(gathered) == [[[0], [10, 11]]] * 2


def test_the_main_rank_is_first():
    order = []
    in_turns(3, in_order, order)
    assert (order[0], sorted(order)) == (0, [0, 1, 2])


def test_if_the_first_fails_so_do_all():
    with pytest.raises(FileNotFoundError, match="no data"):
        in_turns(3, failing_first)


def measured(metrics):
    return lambda run: run.evaluate(torch.nn.Linear(1, 1), torch.zeros(4, 1), metrics)


OTHER_KINDS = [
    (lambda run: run.gather(3), "gather takes a tensor, got an int"),
    *(
        (lambda run, odd=odd: run.gather(odd), "gather takes a dense tensor, got a")
        for odd in (torch.zeros(1, dtype=torch.complex32), torch.eye(2).to_sparse())
    ),
    (measured({"count": Counter}), "got the class Counter as a metric; needed: a samestep metric or a function"),
    (measured(["accuracy"]), "got a list as metrics; needed: metrics by name"),
]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda run, given=given: Run(**{"global_batch_size": 8, **given}), said) for given, said in OF_RUNS),
        *((lambda run, given=given: step_with(**given), said) for given, said in OF_STEPS),
        *OTHER_NAMES,
        *OTHER_KINDS,
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    assert refusal(lambda: call(Run(8))).startswith(message)


def test_a_batch_that_no_forward_takes_is_refused_before_training():
    data = {"x": torch.zeros(8, 1)}
    model, trained = torch.nn.Linear(1, 1), []

    def loss(model, batch):
        trained.append(1)
        return model(batch["x"]).mean()

    trainer = Trainer(Run(4), model, torch.optim.SGD(model.parameters(), 0.1), loss)
    with trainer, pytest.raises(UsageError, match="a batch is a dict; say how to run the model on it"):
        trainer.fit(data, 1, eval_data=data, metrics={"mean": lambda output, batch: output})
    assert not trained
