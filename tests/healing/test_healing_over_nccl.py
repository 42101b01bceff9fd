"""Runs over NCCL do not heal: what is queued behind an exchange that a loss aborts would run on half of its result."""

import pytest
import torch.distributed as dist
from gpus import needs_fake_gpus, run_ranks, told

pytestmark = needs_fake_gpus

SUPERVISED = """
    from samestep import Run
    from samestep.comm import heartbeat_page as pages
    from samestep.errors import UsageError
    page = pages.HeartbeatPage.create(size)
    os.environ.update({pages.PAGE_VARIABLE: str(page.fd), pages.SLOT_VARIABLE: str(rank)})
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        run = Run(8, 4, device=str(device), spares=SPARES)
    except UsageError as error:
        tell(error=str(error))
        os._exit(0)
    flags = page.beat(rank).flags
    model = nn.Linear(2, 1)
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x[0]).square().mean())
    losses = [step(batch).loss for batch in run.loader((torch.ones(16, 2),))]
    over_nccl = run.membership.communicator.transport.stream is not None
    tell(over_nccl=over_nccl, heals=run.membership.can_heal, flags=flags, steps=len(losses))
"""


def run_supervised(folder, spares=0, transport=None):
    """What two ranks tell that believe a supervisor watches them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a supervisor's outlives its ranks
    variables = {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SAMESTEP_TRANSPORT": transport,
    }
    return told(run_ranks(folder, SUPERVISED.replace("SPARES", str(spares)), **variables))


@pytest.mark.parametrize(("transport", "over_nccl"), [(None, True), ("gloo", False)])
def test_a_run_over_nccl_does_not_heal_but_shows_that_it_lives(transport, over_nccl, tmp_path):
    from samestep.comm.heartbeat_page import HEALS, SHOWS_LIFE

    for found in run_supervised(tmp_path, transport=transport):
        assert (found["over_nccl"], found["heals"], found["steps"]) == (over_nccl, not over_nccl, 2)
        assert bool(found["flags"] & HEALS) is not over_nccl
        assert bool(found["flags"] & SHOWS_LIFE) is over_nccl


def test_spares_are_refused_over_nccl(tmp_path):
    for found in run_supervised(tmp_path, spares=1):
        assert "leave --spares out, or set SAMESTEP_TRANSPORT=gloo" in found["error"]
