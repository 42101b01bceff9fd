"""The suites: which tests of which project, with how many ranks; and why some do not pass here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Tests of one project.

    Attributes:
        kind: how in_rank.py runs them; "script": a program each, which passes if it exits with 0.
        sources: modules, or files and folders in the project's checkout.
        checkout: the folder of --sources that has them; "" if they are in an installed package.
        package: whose version the page has.
        ranks: the numbers of ranks they run with.
        least: how many pass under torchrun at the least.
        is_short: part of the gate.
    """

    name: str
    kind: str
    sources: tuple[str, ...]
    package: str
    ranks: tuple[int, ...]
    least: int
    checkout: str = ""
    is_short: bool = False


SUITES = (
    Suite(
        "torch: distributed_test",
        "torch",
        ("torch.testing._internal.distributed.distributed_test",),
        "torch",
        (3,),
        least=80,
        is_short=True,
    ),
    Suite(
        "Accelerate: test_utils/scripts",
        "script",
        tuple(f"accelerate.test_utils.scripts.{name}" for name in ("test_ops", "test_script", "test_sync")),
        "accelerate",
        (2,),
        least=3,
        is_short=True,
    ),
)

REASONS = {
    "accelerate.test_utils.scripts.test_ops": "it takes memory that nobody has written (`torch.empty`) for zeros",
    "TestDistributed.test_ddp_logging_data_cpu": "DDP's log names the backend that carries the bytes: samestep's",
}
