"""The stream of the exchange: what is enqueued early changes no bits, and streams wait for each other."""

import pytest
import torch
from gpus import needs_fake_gpus, run
from nodes_programs import train_by_nodes
from programs import train_small
from worlds import in_turns

from samestep.comm.communicator import Communicator
from samestep.comm.reduction import Reduction
from samestep.run.run import Run

MANY_BUCKETS = {"bucket_bytes": 1000, "max_grad_norm": 0.5}


def each(model, x):
    """A loss a sample."""
    return model(x).sum(1)


def test_folding_earlier_buckets_while_backward_runs_changes_no_bits(monkeypatch):
    ((expected, *_),) = in_turns(1, train_small, MANY_BUCKETS)
    folds = []
    real = Reduction.fold
    monkeypatch.setattr(Reduction, "fold", lambda self: folds.append(self) or real(self))
    in_turns(3, train_small, MANY_BUCKETS)
    needed = len(folds)
    monkeypatch.setattr(Communicator, "folds_beside", True)
    assert [digest for digest, *_ in in_turns(3, train_small, MANY_BUCKETS)] == [expected] * 3
    assert len(folds) > 2 * needed, "buckets were folded early, and folding them again did nothing"


def test_folds_grow_with_the_number_of_buckets_not_with_its_square(monkeypatch):
    folds, buckets = [], 80
    real = Reduction.fold
    monkeypatch.setattr(Reduction, "fold", lambda self: folds.append(self) or real(self))
    monkeypatch.setattr(Communicator, "folds_beside", True)

    def program(communicator):
        run = Run(8, 2, communicator=communicator)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(buckets)))
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), each, bucket_bytes=1)
        step(torch.ones(8, 4))

    in_turns(2, program)
    assert buckets < len(folds) / 2 < 4 * buckets


def test_folding_while_backward_runs_goes_on_by_nodes_as_well(worlds):
    ((expected, *_),) = in_turns(1, train_small, MANY_BUCKETS)
    results = worlds(4, "auto", (2, 2)).run(train_by_nodes, MANY_BUCKETS, True)
    assert [digest for (digest, *_), _ in results] == [expected] * 4


PROGRAM = """
    import torch
    from samestep.comm.communicator import Communicator
    from samestep.comm.transport import LocalTransport
    from samestep.core.tree import Block, TreeSum, rank_blocks

    transport = LocalTransport()
    transport.stream = torch.cuda.Stream()
    device = torch.device("cuda", 0)
    communicator = Communicator(device, transport, transport)
    torch.cuda.synchronize()
    counter = TreeSum(torch.add)
    for number in range(7):  # three sums, which are added on the stream of the exchange
        counter.push(Block(number, 1), torch.full((1000,), float(number), device=device))
    reduction = communicator.reduce(rank_blocks((range(7),), 7), counter.sums, torch.zeros(1000, device=device))
    del counter
    others = [torch.full((1000,), 9.0, device=device) for _ in range(8)]  # in memory that nothing holds any more
    reduction.fold()
    total = reduction.finish()
    print(bool((total == 21).all()))
"""


@needs_fake_gpus
@pytest.mark.parametrize("order", ["late", "early"])
def test_the_exchange_reads_what_the_callers_stream_made_and_the_caller_what_the_exchange_made(order):
    assert run(PROGRAM, order=order, FAKE_CUDA_LATE_US="10000000").split() == ["True"]
