"""The cause: one thing that makes results depend on the devices, with the sign that points to it and its antidote.

How a verdict uses the table (`samestep.verify.causes.table.CAUSES`):

- `suspect(evidence)` looks at recordings in which nothing was neutralised, and says in a sentence what it saw.
- `neutralise()` is entered in the worker on every rank, in all runs that are compared, before the program is imported.
  It puts its hooks before those that are there already, so a probe sees what the optimizer sees.
- A cause with `bits_only` changes nothing but the rounding of sums. It is asked about only where runs agree up to
  rounding and more is required. Where all such causes are neutralised, the program computes in float64 and every
  gradient is rounded to float32 before the update, so gradients and states are equal to the bit, with the checksums
  of float64 tensors; its counterfactual is therefore compared to the bit (losses up to rounding: a mean over ranks is
  a sum too).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from samestep.verify.causes.evidence import Evidence


@dataclass(frozen=True)
class Cause:
    """One row of the table.

    Attributes:
        key: its short name, such as "batchnorm".
        title: what it is, in a clause.
        advice: what mends it, in one or two sentences.
        suspect: from what was recorded, a sentence that says what points to it, with names and numbers; None if nothing
            does.
        neutralise: a context under which the cause has no effect, for this worker.
        bits_only: whether it changes nothing but the rounding of sums.
    """

    key: str
    title: str
    advice: str
    suspect: Callable[[Evidence], str | None]
    neutralise: Callable[[], AbstractContextManager[None]]
    bits_only: bool = False
