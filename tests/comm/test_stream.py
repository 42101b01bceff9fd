"""The stream of the exchange: what is enqueued early changes no bits. A CPU can try the order of the calls."""

from contextlib import contextmanager

import pytest
import torch
from leaves import make_leaves
from nodes_programs import train_by_nodes
from programs import reduce_leaves, train_small
from worlds import in_turns

from samestep.comm.communicator import Communicator
from samestep.comm.reduction import Reduction
from samestep.comm.transport import LocalTransport
from samestep.core.tree import Block, tree_sum
from samestep.train.run import Run

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


def test_streams_wait_for_each_other_and_memory_is_handed_over(monkeypatch):
    """With stand-ins for the streams: what is noted is who waits for whom, and where each piece of the work is done."""
    noted = []

    class Stream:
        device = torch.device("cpu")

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            noted.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream):
        noted.append(f"work on {stream.name}")
        yield

    own, callers = Stream("own"), Stream("callers")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: noted.append(f"kept for {stream.name}"))
    transport = LocalTransport()
    transport.stream = own
    communicator = Communicator(torch.device("cpu"), transport, transport)
    leaf = torch.ones(64)
    reduction = communicator.reduce(((Block(0, 1),),), [leaf], leaf)
    assert noted == ["own waits for callers", "work on own", "kept for own"]
    reduction.fold()
    assert torch.equal(reduction.finish(), torch.ones(64))
    assert noted[3:] == ["callers waits for own", "kept for callers"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device, so there are no streams")
def test_a_reduction_on_a_stream_of_its_own_reads_what_the_callers_stream_made():
    transport = LocalTransport()
    transport.stream = torch.cuda.Stream()
    device = torch.device("cuda")
    communicator = Communicator(device, transport, transport)
    leaves = [leaf.to(device) for leaf in make_leaves(8, 64 * 10_000)]
    expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
    torch.cuda._sleep(50_000_000)  # what comes next on this stream is made late
    late = [leaf + 0 for leaf in leaves]
    total = reduce_leaves(communicator, late, 64 * 10_000)
    assert torch.equal(total, expected)
