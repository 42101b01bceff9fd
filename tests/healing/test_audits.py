"""A device that computes or holds wrong bits is left out by the audit, before these are written; twins without one."""

import pytest
from test_faults import check_healed

from samestep.core.seeds import derive_seed
from samestep.engine.audit import AUDIT_STREAM
from samestep.launcher.job import Policy

STEP, SEED, V = 5, 3, 8
MICROBATCH = derive_seed(SEED, AUDIT_STREAM, 0, STEP) % V
OWNER = next(rank for rank in range(3) if (rank + 1) * V // 3 > MICROBATCH)
AUDITED = {"audit": 1}


def fault(kind, rank):
    return {"rank": rank, "step": STEP, "phase": "forward", "kind": kind}


@pytest.mark.parametrize(("kind", "rank"), [("flip", 0), ("flip", 2), ("wrong gradients", OWNER)])
def test_a_wrong_device_is_left_out_and_the_run_ends_in_the_undisturbed_bits(train, undisturbed, kind, rank):
    told = train(3, [fault(kind, rank)], options=AUDITED)
    check_healed(told, undisturbed)
    [found] = [event for event in told.events if event["event"] == "audit"]
    assert (found["step"], found["ranks"], found["action"]) == (STEP + 1, [rank], "exclude")
    if kind == "flip":
        assert (found["microbatch"], found["names"]) == (None, ["0.weight"])
    else:
        assert found["microbatch"] == MICROBATCH
        assert any(name.startswith("gradient of") for name in found["names"])
    [death] = [event for event in told.events if event["event"] == "death"]
    assert (death["rank"], death["cause"]) == (rank, "AuditError")


def test_no_worker_takes_the_place_of_one_whose_device_is_wrong(train, undisturbed):
    told = train(3, [fault("flip", 1)], Policy(hang_seconds=5.0, replace=True, max_restarts=1), options=AUDITED)
    check_healed(told, undisturbed)
    assert "join" not in {event["event"] for event in told.events}


def test_without_an_audit_a_wrong_device_decides_the_bits_and_nothing_says_so(train, undisturbed):
    told = train(3, [fault("wrong gradients", OWNER)])
    assert told.outcome.exit_code == 0
    assert told.digests != undisturbed.digests
    assert not {"audit", "death"} & {event["event"] for event in told.events}


@pytest.mark.parametrize(
    ("devices", "kind", "action", "said"),
    [(3, "flip", "stop", "are wrong|is wrong"), (2, "flip", "exclude", "cannot be told which is wrong")],
)
def test_a_run_that_ends_by_an_audit_names_the_device_and_has_an_exit_code_of_its_own(
    train, undisturbed, devices, kind, action, said
):
    told = train(devices, [fault(kind, 1)], options={"audit": f"1:{action}"})
    assert told.outcome.exit_code == 3
    assert any(words in told.outcome.failure for words in said.split("|"))
    assert "rank 1 (cpu of host" in told.outcome.failure
    assert told.steps == undisturbed.steps[:STEP]
    [found] = [event for event in told.events if event["event"] == "audit"]
    assert (found["step"], found["action"], found["ranks"]) == (STEP + 1, "stop", [1] if devices == 3 else [])
