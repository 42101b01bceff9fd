"""The record of an epoch, the record of the epoch under way, and the metric by which epochs are compared."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from math import isfinite, isnan, nan
from typing import Any

from samestep.errors import UsageError

LOWER_IS_BETTER = ("loss", "error", "perplexity", "cross_entropy")  # endings of the names of such metrics


@dataclass(frozen=True)
class EpochRecord:
    """The results of one epoch.

    Attributes:
        epoch: counted from 1, as it is shown.
        seconds: of training, without evaluation.
        samples_per_second: of training.
        train_loss: the sum of the loss over the epoch, over the sum of its counts.
        eval: metrics after the epoch; empty without evaluation data.
        scalars: means over the epoch of what the loss function returned beside the loss.
    """

    epoch: int
    seconds: float
    samples_per_second: float
    train_loss: float
    eval: dict[str, float]
    scalars: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The record as a JSON object; without scalars if there are none."""
        return {name: value for name, value in asdict(self).items() if name != "scalars" or value}

    def tags(self) -> dict[str, float]:
        """The scalars for loggers."""
        scalars = {"epoch": float(self.epoch), "loss/train_epoch": self.train_loss}
        scalars["samples_per_second"] = self.samples_per_second
        scalars.update({f"{name}/train_epoch": value for name, value in self.scalars.items()})
        scalars.update({f"{name}/eval": value for name, value in self.eval.items()})
        return scalars

    def describe(self, shown: Iterable[tuple[str, str]]) -> str:
        """The line that is shown, with some of the metrics and their labels: ("accuracy", "test acc")."""
        why = " (every step was skipped: loss or gradient was not finite)" if isnan(self.train_loss) else ""
        text = f"epoch {self.epoch}, time {self.seconds:.1f} s, train loss {self.train_loss:#.4g}{why}"
        for name, label in shown:
            if name in self.eval:
                text += f", {label} {self.eval[name]:#.4g}"
        return f"{text}, {self.samples_per_second:,.0f} samples/s"


@dataclass(frozen=True)
class BestMetric:
    """The metric by which epochs are compared, and the number of evaluations without a better one that end the run."""

    metric: str
    mode: str
    patience: int | None

    @classmethod
    def of(cls, best: str | tuple[str, str] | None, patience: int | None) -> "BestMetric | None":
        """The metric by arguments of `Trainer`; None without any."""
        if best is None:
            if patience is not None:
                raise UsageError(f"got patience={patience!r} without best; name a metric: best='accuracy' (--best)")
            return None
        given = (best,) if isinstance(best, str) else tuple(best)
        name, mode = (*given, "min" if given and str(given[0]).endswith(LOWER_IS_BETTER) else "max")[:2]
        if len(given) > 2 or not isinstance(name, str) or not name or mode not in ("min", "max"):
            raise UsageError(
                f"got best={best!r}; needed: the name of a metric, or its name and 'min' or 'max', such as "
                "('loss', 'min')"
            )
        return cls(name, mode, patience)

    def check(self, metrics: Mapping[str, Any] | None, has_data: bool) -> None:
        """Raises a `UsageError` unless the metric is measured."""
        # A metric with several entries gives `name/entry`.
        if not has_data or not {self.metric, self.metric.partition("/")[0]} & {*(metrics or {})}:
            there = f"the metrics {', '.join(metrics or {}) or 'none'}" if has_data else "no eval_data"
            near = get_close_matches(self.metric, metrics or {}, 1)
            needed = (
                f"did you mean {near[0]!r}?" if near and has_data else "needed: eval_data, and a metric of this name"
            )
            raise UsageError(f"got best={self.metric!r}, and fit has {there}; {needed} (--best)")

    def check_measured(self, found: Mapping[str, float]) -> None:
        """Raises a `UsageError` unless an evaluation gave the metric a value."""
        if self.metric not in found:
            raise UsageError(f"got best={self.metric!r}; the evaluation gave {', '.join(found)}: name one (--best)")

    def best(self, history: Iterable[EpochRecord]) -> EpochRecord | None:
        """The best epoch, the first of equal ones; None if there is none with a finite value."""
        sign = 1 if self.mode == "max" else -1
        measured = [record for record in history if isfinite(record.eval.get(self.metric, nan))]
        return max(measured, key=lambda record: sign * record.eval[self.metric], default=None)

    def is_given_up(self, history: Iterable[EpochRecord]) -> bool:
        """Whether as many evaluations as `patience` have brought nothing better than the best before them."""
        measured = [record for record in history if self.metric in record.eval]
        best = self.best(measured)
        num_since = len(measured) if best is None else len(measured) - 1 - measured.index(best)
        return self.patience is not None and num_since >= self.patience


def mean_of(total: float, count: float) -> float:
    """The mean of an epoch; NaN if it has counted nothing."""
    return total / count if count else float("nan")


@dataclass
class EpochSoFar:
    """The epoch under way; part of a checkpoint, so that a resumed epoch ends as it would have."""

    num_batches: int = 0
    num_samples: int = 0
    total: float = 0.0  # the sum of the loss
    count: float = 0.0  # its divisor
    scalars: dict[str, tuple[float, float]] = field(default_factory=dict)  # of those beside the loss: sum and divisor
    seconds: float = 0.0
    has_begun: bool = False
    of_loader: list[Any] = field(default_factory=list)  # the state of a loader of the user's own at its beginning
