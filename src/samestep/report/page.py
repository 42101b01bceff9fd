"""The page of a report: one HTML file that needs no network and no server."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from samestep.report import page_sections
from samestep.report.events import QUIET
from samestep.report.formatting import number
from samestep.report.reader import json_number
from samestep.report.run_summary import Report, RunSummary
from samestep.report.series import Chart, line_dashes, make_charts
from samestep.train.curves import Series

SCRIPTS = ("scales.js", "marks.js", "drawing.js", "page.js")
MAX_MARKS = 400  # events that are marked on the curves, of all runs


def make_page(report: Report) -> str:
    """The page as HTML text, below a megabyte.

    All text of a run is escaped; besides, the page forbids itself all scripts but its own and all requests.
    """
    script = '(() => {\n"use strict";\n' + "\n".join(map(_template, SCRIPTS)) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(f"{', '.join(run.name for run in report.runs)} · samestep report"),
        "script_hash": f"'sha256-{digest}'",
        "style": _template("page.css"),
        **page_sections.make_sections(report),
        "data": _safe_json(_data(report)),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template("page.html"))


def _data(report: Report) -> dict[str, Any]:
    """The data that the script draws."""
    charts = [_chart(chart) for chart in make_charts(report)]
    if len(charts) % 2 == 0 and len(charts) > 1:
        charts[-1]["whole"] = True  # a narrow one that would be alone in its row takes the whole of it
    runs = zip(report.runs, line_dashes(report), strict=True)
    return {
        "runs": [_run(run) | {"dash": " ".join(map(str, dash))} for run, dash in runs],
        "events": _events(report),
        "charts": charts,
        "has_time": all(run.time.steps for run in report.runs),
    }


def _run(run: RunSummary) -> dict[str, Any]:
    return {
        "name": run.name,
        "first": min((int(curve.steps[0]) for curve in run.curves.values() if len(curve)), default=0),
        "last": run.num_steps,
        "clock": {"steps": _rounded(run.time.steps), "seconds": _rounded(run.time.seconds)},
    }


def _events(report: Report) -> list[dict[str, Any]]:
    """The events to be marked; of too many every so many, of checkpoints and of the others."""
    marked, checkpoints = [], []
    for index, run in enumerate(report.runs):
        for event, seconds in zip(run.events, _rounded(run.time.event_seconds), strict=True):
            mark = {"run": index, "step": event.step, "seconds": seconds, "name": event.name, "label": event.label}
            mark |= {"sentence": event.sentence, "quiet": event.name in QUIET}
            if event.name == "checkpoint":
                checkpoints.append(mark)
            elif event.name not in QUIET:
                marked.append(mark)
    return [mark for marks in (marked, checkpoints) for mark in marks[:: -(-len(marks) // MAX_MARKS) or 1]]


def _chart(chart: Chart) -> dict[str, Any]:
    stack = None
    if chart.stack is not None:
        run, phases = chart.stack
        rows = [_rounded(row) for row in phases.seconds.tolist()]
        stack = {"run": run, "names": phases.names, "x": phases.steps.tolist(), "rows": rows}
    return vars(chart) | {
        "whole_numbers": chart.key == "world_size",
        "whole": chart.key == "loss",
        "summary": _summary(chart),
        "series": [_series(series) for series in chart.series],
        "stack": stack,
    }


def _series(series: Series) -> dict[str, Any]:
    """The points of a line, in six digits; values that are not finite are gaps, and listed by name."""
    points = list(zip(series.curve.steps.tolist(), series.curve.values.tolist(), strict=True))
    return {
        "run": series.run,
        "label": series.label,
        "style": series.style,
        "x": [step for step, _ in points],
        "y": [float(f"{value:.6g}") if math.isfinite(value) else None for _, value in points],
        "bad": [
            [step, str(json_number(value)).replace("nan", "NaN")] for step, value in points if not math.isfinite(value)
        ],
    }


def _summary(chart: Chart) -> str:
    """A sentence for screen readers."""
    if chart.stack is not None:
        return ", ".join(f"{name} {100 * share:.0f} %" for name, share in chart.stack[1].shares.items()) + "."
    curves = [series.curve for series in chart.series if series.style != "faint"]
    texts = [f"{number(float(curve.values[0]))} to {number(curve.last)}" for curve in curves[:6] if len(curve)]
    return f"From first to last: {'; '.join(texts)}." if texts else ""


def _rounded(values: Iterable[float | None] | Sequence[float]) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in values]


def _safe_json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _template(name: str) -> str:
    return files("samestep.report").joinpath("page", name).read_text(encoding="utf-8")
