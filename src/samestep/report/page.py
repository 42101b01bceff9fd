"""The page of a report: one HTML file that needs no network and no server."""

import base64
import hashlib
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from samestep.report import sections
from samestep.report.charts import Chart, Series, line_dashes, make_charts
from samestep.report.curves import drawn, json_number
from samestep.report.events import QUIET
from samestep.report.story import RunStory, Story
from samestep.report.words import number

SCRIPTS = ("scales.js", "marks.js", "drawing.js", "page.js")
MAX_MARKS = 400  # events that are marked on the curves, of all runs


def make_page(story: Story) -> str:
    """The page of a story as HTML text, below a megabyte.

    Whatever comes from a run is escaped; besides, the page forbids itself all scripts but its own and all requests.
    """
    charts = make_charts(story)
    script = '(() => {\n"use strict";\n' + "\n".join(_template(name) for name in SCRIPTS) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(f"{', '.join(run.name for run in story.runs)} · samestep report"),
        "script_hash": f"'sha256-{digest}'",
        "style": _template("page.css"),
        "header": sections.header(story),
        "summary": sections.summary(story),
        "proof": sections.proof(story),
        "time": sections.time(story),
        "epochs": sections.epochs(story),
        "events": sections.events(story),
        "contract": sections.contract(story),
        "footer": sections.footer(story),
        "data": _safe_json(_data(story, charts)),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template("page.html"))


def _data(story: Story, charts: tuple[Chart, ...]) -> dict[str, Any]:
    """What the script draws."""
    return {
        "runs": [
            _run(run) | {"dash": " ".join(map(str, dash))}
            for run, dash in zip(story.runs, line_dashes(story), strict=True)
        ],
        "events": _events(story),
        "charts": _charts(charts),
        "has_time": all(run.clock.steps for run in story.runs),
    }


def _run(run: RunStory) -> dict[str, Any]:
    first = [int(curve.steps[0]) for curve in run.curves.values() if len(curve)]
    return {
        "name": run.name,
        "first": min(first, default=0),
        "last": run.num_steps,
        "clock": {"steps": _rounded(run.clock.steps), "seconds": _rounded(run.clock.seconds)},
    }


def _events(story: Story) -> list[dict[str, Any]]:
    """The events to be marked; where there are too many, every so many checkpoints and then of the others."""
    found = []
    for number_of_run, run in enumerate(story.runs):
        for event, seconds in zip(run.events, run.clock.event_seconds, strict=True):
            mark = {"run": number_of_run, "step": event.step, "seconds": _round(seconds), "name": event.name}
            mark |= {"label": event.label, "sentence": event.sentence, "quiet": event.name in QUIET}
            found.append(mark)
    marked = [mark for mark in found if not mark["quiet"]]
    quiet = [mark for mark in found if mark["name"] == "checkpoint"]
    return [*_sampled(marked, MAX_MARKS), *_sampled(quiet, MAX_MARKS)]


def _charts(charts: tuple[Chart, ...]) -> list[dict[str, Any]]:
    """The charts; a last narrow one that would stand alone in its row takes the whole of it."""
    found: list[dict[str, Any]] = []
    for chart in charts:
        described = {
            "key": chart.key,
            "title": chart.title,
            "note": chart.note,
            "unit": chart.unit,
            "log": chart.is_log,
            "may_log": chart.may_log,
            "whole_numbers": chart.key == "world_size",
            "whole": chart.key == "loss",
            "summary": _summary(chart),
            "series": [_series(series) for series in chart.series],
            "stack": None,
        }
        if chart.stack is not None:
            run, phases = chart.stack
            rows = [[_round(value) for value in row] for row in phases.seconds.tolist()]
            described["stack"] = {"run": run, "names": phases.names, "x": phases.steps.tolist(), "rows": rows}
        found.append(described)
    if len(found) % 2 == 0 and len(found) > 1:
        found[-1]["whole"] = True
    return found


def _series(series: Series) -> dict[str, Any]:
    steps, values = drawn(series.curve)
    raw = series.curve.values.tolist()
    bad = [
        [step, str(json_number(value)).replace("nan", "NaN")]
        for step, shown, value in zip(steps, values, raw, strict=True)
        if shown is None
    ]
    label = series.label
    return {"run": series.run, "label": label, "style": series.style, "x": steps, "y": values, "bad": bad}


def _summary(chart: Chart) -> str:
    """A sentence for those who do not see the chart."""
    if chart.stack is not None:
        shares = [f"{name} {100 * share:.0f} %" for name, share in chart.stack[1].shares.items()]
        return f"{', '.join(shares)}."
    lines = [series for series in chart.series if series.style != "faint" and len(series.curve)]
    texts = [f"{number(float(s.curve.values[0]))} to {number(float(s.curve.values[-1]))}" for s in lines[:6]]
    return f"From first to last: {'; '.join(texts)}." if texts else ""


def _sampled(items: list[Any], most: int) -> list[Any]:
    stride = -(-len(items) // most) if items else 1
    return items[::stride]


def _rounded(values: tuple[float, ...]) -> list[float | None]:
    return [_round(value) for value in values]


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _safe_json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _template(name: str) -> str:
    return files("samestep.report").joinpath("page", name).read_text(encoding="utf-8")
