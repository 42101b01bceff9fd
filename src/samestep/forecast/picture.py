"""The forecast as a picture: the scaling curve, and the memory of each layout as bars."""

from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.extras import is_installed, missing
from samestep.forecast.devices import GIB
from samestep.forecast.forecast import Forecast
from samestep.forecast.search import Candidate

COLOURS = ("#0f766e", "#f59e0b", "#7c3aed", "#2563eb", "#94a3b8", "#dc2626", "#334155")
INCHES, DPI = (11, 4.5), 120
MAX_BARS = 8


def write_picture(forecast: Forecast, path: Path) -> None:
    """Writes a PNG.

    Raises:
        UsageError: it cannot be written, or matplotlib is not installed.
    """
    if not is_installed("matplotlib"):
        raise UsageError(missing("matplotlib", "--png"))
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_curve(forecast, left)
    _draw_memory(forecast, right)
    figure.suptitle(f"{forecast.subject} on {forecast.machines.kind.name}: {forecast.chosen.layout.strategy}")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(f"got --png {path}: {error.strerror or error}; needed: a file that can be written") from error


def _draw_curve(forecast: Forecast, axes: Any) -> None:
    devices = [point.num_devices for point in forecast.curve]
    larger = [forecast.rate(point.larger_batch) for point in forecast.curve]
    same = [(p.num_devices, forecast.rate(p.same_batch)) for p in forecast.curve if p.same_batch is not None]
    axes.plot(devices, [larger[0] * count / devices[0] for count in devices], ":", color="#94a3b8", label="linear")
    axes.plot(devices, larger, "o-", color=COLOURS[0], label="batch grows along", markersize=3)
    if same:
        axes.plot(*zip(*same, strict=True), "s-", color=COLOURS[1], label="same batch", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("devices")
    axes.set_ylabel(f"{forecast.unit} a second")
    axes.legend(frameon=False)


def _draw_memory(forecast: Forecast, axes: Any) -> None:
    shown = _bars(forecast)
    bottoms = [0.0] * len(shown)
    for colour, (name, _) in zip(COLOURS, forecast.chosen.memory.rows(), strict=True):
        sizes = [dict(candidate.memory.rows())[name] / GIB for candidate in shown]
        axes.barh(range(len(shown)), sizes, left=bottoms, color=colour, label=name)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axes.axvline(forecast.machines.kind.memory_gib, color="black", linestyle="--", linewidth=1)
    labels = [
        f"{candidate.layout.strategy}\n{candidate.layout.mesh}"
        + (", checkpointed" if candidate.layout.is_checkpointed else "")
        for candidate in shown
    ]
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("GiB a device; dashed: what there is")
    axes.legend(frameon=False, fontsize=7)


def _bars(forecast: Forecast) -> list[Candidate]:
    """The chosen layout, and others that do not dwarf it."""
    limit = 3 * max(forecast.machines.kind.memory_bytes, forecast.chosen.memory.total)
    others = [c for c in forecast.candidates if c is not forecast.chosen and c.memory.total <= limit]
    return [forecast.chosen, *others[: MAX_BARS - 1]]
