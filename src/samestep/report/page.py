"""The HTML page of a report: its sections, and its charts, as the curves that they draw.

`make_page` fills the places of `page/page.html` with HTML, which the functions here make, and with data as JSON, of
which the scripts in `page/` draw the charts. Runs may come from anyone: every text of theirs is escaped, in HTML by
`escape` and in the data by `_safe_json`, and the page's policy runs the one script whose hash it names.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import cycle
from typing import Any, Literal

import numpy as np

from samestep.checkpoint.contract_diff import decides, flat
from samestep.checkpoint.run_folder import CONTRACT_FILE
from samestep.report.formatting import command_text, duration, number, size, value_text
from samestep.report.reader import QUIET, json_number
from samestep.report.run_summary import Finding, Phases, RunReport, RunSummary
from samestep.runs.curves import MAX_BINS, Curve, Series, loss_series, step_series, thinned, wants_log
from samestep.text import visible
from samestep.version import __version__

Unit = Literal["", "share", "bytes", "seconds", "rate"]

BINS_OF_ALL = 3000  # shared by the runs, so that the page of many stays small
MIN_BINS = 100
NUM_COLORS = 6
ON_ANOTHER = ((10, 10), (4, 12), (16, 6))  # dashes and gaps of lines that lie on the first run's
REPEATED: tuple[tuple[int, ...], ...] = ((), (7, 4), (2, 4))  # of lines whose colour is another run's, too
WAITED = "checkpoint/blocked_milliseconds"
KNOWN = ("loss/train", "loss/train_epoch", "loss/eval", "grad_norm", "lr", "samples_per_second", "world_size", WAITED)


@dataclass(frozen=True)
class Chart:
    """One chart: either series, or the stacked phases of one run."""

    key: str
    title: str
    note: str  # beside the title
    unit: Unit
    series: tuple[Series, ...] = ()
    log: bool = False  # at first
    may_log: bool = False
    stack: tuple[int, Phases] | None = None  # the number of the run, and its phases


def make_charts(report: RunReport) -> list[Chart]:
    """The charts of a report, in the order of the page."""
    runs = report.runs
    bins = max(MIN_BINS, min(MAX_BINS, BINS_OF_ALL // len(runs)))
    evals = dict.fromkeys(tag for run in runs for tag in run.eval_tags if tag != "loss/eval")
    own = dict.fromkeys(tag for run in runs for tag in run.curves if _is_own(tag))
    sizes = {size for run in runs if "world_size" in run.curves for size in run.curves["world_size"].finite}
    charts = [
        _loss(runs, bins),
        *(_metric(runs, tag, bins) for tag in evals),
        _each_step(runs, "grad_norm", "Gradient norm", bins),
        _lines(runs, "lr", "Learning rate", "", bins),
        _lines(runs, "samples_per_second", "Throughput", "rate", bins, "each epoch"),
        *(_phases(number, run, len(runs)) for number, run in enumerate(runs)),
        _lines(runs, "memory/host_bytes", "Host memory", "bytes", bins),
        _lines(runs, "memory/device_bytes", "Device memory", "bytes", bins),
        _devices(runs if len(sizes) > 1 else ()),
        _waited(runs, bins),
        *(_each_step(runs, tag, tag, bins) for tag in own),
    ]
    return [chart for chart in charts if chart.series or chart.stack]


def line_dashes(report: RunReport) -> list[tuple[int, ...]]:
    """The dashes and gaps of each run's lines; equal lines lie on each other, and dashes let both be seen."""
    equal = cycle(ON_ANOTHER)
    return [
        (),
        *(
            next(equal) if comparison.num_equal else REPEATED[number // NUM_COLORS % len(REPEATED)]
            for number, comparison in enumerate(report.comparisons, start=1)
        ),
    ]


def loss_table(runs: Sequence[RunSummary], bins: int = MAX_BINS) -> list[Series]:
    """The training and evaluation losses of all runs: the first chart of the page, and the PNG."""
    return [
        series
        for number, run in enumerate(runs)
        for series in loss_series(number, run.curves.get("loss/train"), run.curves.get("loss/eval"), bins)
    ]


def _loss(runs: Sequence[RunSummary], bins: int) -> Chart:
    series = loss_table(runs, bins)
    styles = {each.style for each in series}
    note = "training, each step" + " and smoothed" * ("faint" in styles) + "; ● evaluation" * ("dots" in styles)
    note += "; ▴ checkpoint" * any(event.name == "checkpoint" for run in runs for event in run.events)
    return _with_scale(Chart("loss", "Loss", note, "", tuple(series)), _curves(runs, "loss/train", "loss/eval"))


def _metric(runs: Sequence[RunSummary], tag: str, bins: int) -> Chart:
    name, curves = tag.removesuffix("/eval"), _curves(runs, tag)
    is_share = all(((curve.finite >= 0) & (curve.finite <= 1)).all() for curve in curves)
    unit: Unit = "share" if is_share and "acc" in name else ""
    chart = _lines(runs, tag, name[:1].upper() + name[1:], unit, bins, "evaluation")
    return chart if is_share else _with_scale(chart, curves)


def _each_step(runs: Sequence[RunSummary], tag: str, title: str, bins: int) -> Chart:
    series = [each for number, run in enumerate(runs) for each in step_series(number, run.curves.get(tag), "", bins)]
    note = "each step" + " and smoothed" * any(each.style == "faint" for each in series)
    return _with_scale(Chart(tag, title, note, "", tuple(series)), _curves(runs, tag))


def _lines(runs: Sequence[RunSummary], tag: str, title: str, unit: Unit, bins: int, note: str = "") -> Chart:
    return _from_each(runs, Chart(tag, title, note, unit), lambda curve: thinned(curve, bins))


def _devices(runs: Sequence[RunSummary]) -> Chart:
    """The number of devices, drawn in steps: the points at which it changes, at most 500."""

    def changes(curve: Curve) -> Curve:
        new = np.flatnonzero(np.diff(curve.values, prepend=np.nan) != 0)
        chosen = sorted({*new[:498].tolist(), len(curve) - 1})
        return Curve(curve.steps[chosen], curve.values[chosen])

    chart = _from_each(runs, Chart("world_size", "Devices", "", ""), changes)
    return replace(chart, series=tuple(replace(series, style="steps") for series in chart.series))


def _waited(runs: Sequence[RunSummary], bins: int) -> Chart:
    """Seconds that a step waited for each checkpoint."""
    chart = Chart(WAITED, "Step held up by a checkpoint", "", "seconds")
    chart = _from_each(runs, chart, lambda curve: thinned(Curve(curve.steps, curve.values / 1000), bins))
    return replace(chart, series=tuple(replace(series, style="dots") for series in chart.series))


def _phases(number: int, run: RunSummary, num_runs: int) -> Chart:
    stack = (number, run.phases.thinned(MAX_BINS // 3 if num_runs < 4 else MIN_BINS)) if len(run.phases.steps) else None
    note = run.name if num_runs > 1 else "mean host seconds in each phase"
    return Chart(f"phases-{number}", "Time of a step", note, "seconds", stack=stack)


def _from_each(runs: Sequence[RunSummary], chart: Chart, make: Callable[[Curve], Curve]) -> Chart:
    found = [(number, run.curves[chart.key]) for number, run in enumerate(runs) if chart.key in run.curves]
    return replace(
        chart, series=tuple(Series(number, "", "line", make(curve)) for number, curve in found if len(curve))
    )


def _with_scale(chart: Chart, curves: Sequence[Curve]) -> Chart:
    """The chart with a switch to a logarithmic axis, if all its values are positive."""
    is_positive = any(len(c.finite) for c in curves) and all((c.finite > 0).all() for c in curves)
    return replace(chart, log=wants_log(curves), may_log=is_positive)


def _curves(runs: Sequence[RunSummary], *tags: str) -> list[Curve]:
    return [run.curves[tag] for run in runs for tag in tags if tag in run.curves]


def _is_own(tag: str) -> bool:
    """Whether the user logged a tag."""
    return tag not in KNOWN and not tag.endswith("/eval") and not tag.startswith("memory/")


SIGNS = {"holds": ("✓", "Holds"), "fails": ("✕", "Fails"), "note": ("·", "Note")}
TALL = 15  # rows from which a table scrolls by itself
MAX_EVENTS = 300
MAX_EPOCHS = 1000
ALL = range(99)  # columns


def _header(report: RunReport) -> str:
    runs = report.runs
    first = runs[0]
    if len(runs) == 1:
        names, lead = first.name, first.title
    else:
        names = f"{', '.join(run.name for run in runs[:-1])} and {runs[-1].name}" if len(runs) < 5 else ""
        names = names or f"{first.name} and {len(runs) - 1} other runs"
        titles = list(dict.fromkeys(run.title for run in runs))
        lead = "; ".join(titles[:3]) + "; …" * (len(titles) > 3)
    terms = f"<br>{escape(first.terms)}" if first.terms and len({run.terms for run in runs}) == 1 else ""
    return f'<p class="over">samestep report</p>\n<h1>{escape(names)}</h1>\n<p class="lead">{escape(lead)}{terms}</p>'


def _summary(report: RunReport) -> str:
    """The figures of one run; a table for several."""
    return _figures(report.runs[0]) if len(report.runs) == 1 else _runs_table(report)


def _figures(run: RunSummary) -> str:
    figures = [("state", run.state), ("steps", f"{run.num_steps:,}")]
    figures += [("epochs", f"{max(run.epochs):,}")] if run.epochs else []
    figures += [("train loss", number(run.train_loss))] if run.train_loss is not None else []
    figures += [(f"{run.metric[0]} (eval)", number(run.metric[1]))] if run.metric else []
    figures += [("samples a second", number(run.throughput))] if run.throughput else []
    figures += [("begun", run.begun)] if run.begun else []
    figures += [("training time", duration(run.seconds))] if run.seconds else []
    figures += [("ran on", run.devices)] if run.devices else []
    figures += [(f"{name} memory, at most", size(value)) for name, value in run.memory.items()]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    if run.digest:
        code = f"<code>{escape(run.digest)}</code>"
        cells += f'<div class="wide"><dt>digest of the final state</dt><dd>{code}</dd></div>'
    return f'<dl class="figures">{cells}</dl>'


def _runs_table(report: RunReport) -> str:
    metrics = list(dict.fromkeys(tag for run in report.runs for tag in run.eval_tags))
    shown = sorted(metrics, key=lambda tag: tag == "loss/eval")[:4]
    titles = ["run", "state", "steps", "train loss", *(f"{t.removesuffix('/eval')} (eval)" for t in shown)]
    titles += ["samples/s", "training time", "ran on", "digest"]
    rows = []
    for index, run in enumerate(report.runs):
        digest = f'<code title="{escape(run.digest)}">{escape(run.digest[:8])}…</code>' if run.digest else "-"
        evals = [number(run.curves[tag].last) if tag in run.curves else "-" for tag in shown]
        cells = [escape(run.state), f"{run.num_steps:,}", number(run.train_loss), *evals, number(run.throughput)]
        cells += [duration(run.seconds), escape(run.devices or "-"), digest]
        rows.append([_swatched(run.name, f"run-{index % 6}"), *cells])
    return f'<section class="runs">{_table(titles, rows, numeric=range(2, 6 + len(shown)), html=ALL)}</section>'


def _proof(report: RunReport) -> str:
    several = bool(report.comparisons)
    pairs = "".join(
        _finding(each.finding, f"<strong>{escape(f'{each.first} and {each.other}')}</strong>: ")
        for each in report.comparisons
    )
    runs = ""
    for run in report.runs:
        title = f"<h3>{escape(run.name)}</h3>" if several else ""
        runs += f'{title}<ul class="findings">{"".join(map(_finding, run.findings))}</ul>'
    if several:
        fails = any(finding.verdict == "fails" for run in report.runs for finding in run.findings)
        runs = f"<details{' open' if fails else ''}><summary>Each run by itself</summary>{runs}</details>"
        runs = f'<ul class="findings">{pairs}</ul>{runs}'
    return _section("What the ledger proves", runs)


def _time(report: RunReport) -> str:
    """A bar of the phases for each run, with the numbers in a table."""
    runs = [run for run in report.runs if run.phases.shares]
    if not runs:
        return ""
    names = list(dict.fromkeys(name for run in runs for name in run.phases.shares))
    several = len(runs) > 1
    bars = ""
    for run in runs:
        spans = [
            f'<span style="flex-grow: {share:.5f}; background: var(--part-{names.index(name) % 6})"></span>'
            for name, share in run.phases.shares.items()
            if share > 0
        ]
        bars += f"<h3>{escape(run.name)}</h3>" if len(report.runs) > 1 else ""
        bars += f'<div class="bar" aria-hidden="true">{"".join(spans)}</div>'
    rows = []
    for index, name in enumerate(names):
        shares = [run.phases.shares.get(name) for run in runs]
        cells = ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
        if not several:
            total = float(runs[0].phases.totals[index])
            seconds = total / max(1, int(runs[0].phases.steps[-1]))
            cells += [f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s", duration(total)]
        rows.append([_swatched(name, f"part-{index % 6}"), *cells])
    titles = ["phase", *(run.name for run in runs)] if several else ["phase", "share", "a step", "in all"]
    note = '<p class="quiet">Mean host seconds of each step, as measured about once a second.</p>'
    return _section("Where the time goes", bars + _table(titles, rows, numeric=ALL[1:], html={0}) + note)


def _epochs(report: RunReport) -> str:
    parts = ""
    for run in report.runs:
        titles, rows = run.epoch_table()
        if rows:
            caption = run.name if len(report.runs) > 1 else ""
            parts += _table(titles, rows[-MAX_EPOCHS:], numeric=ALL, caption=caption)
        if len(rows) > MAX_EPOCHS:
            parts += f'<p class="quiet">The {len(rows) - MAX_EPOCHS:,} epochs before are left out here.</p>'
    return _section("Epochs", parts) if parts else ""


def _events(report: RunReport) -> str:
    found = [(run, event) for run in report.runs for event in run.events]
    if not found:
        return _section("Events", '<p class="quiet">The ledger holds none.</p>')
    shown, note = found, ""
    if len(found) > MAX_EVENTS:
        shown = [each for each in found if each[1].name != "checkpoint"][:MAX_EVENTS]
        left_out = len(found) - len(shown)
        note = f'<p class="quiet">{left_out:,} more events, checkpoints above all, are left out here.</p>'
    several = len(report.runs) > 1
    titles = ["step", "time (UTC)", *["run"] * several, "what happened"]
    rows = []
    for run, event in shown:
        moment = "-" if event.time is None else event.time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        rows.append([f"{event.step:,}", moment, *[run.name] * several, event.sentence])
    return _section("Events", _table(titles, rows, numeric=(0,)) + note)


def _contract(report: RunReport) -> str:
    """The contract; for several runs the fields that differ first, those that decide the bits before all."""
    runs = report.runs
    contracts = [dict(flat(run.contract)) for run in runs]
    for contract in contracts:
        if command := command_text(contract.get("command")):
            contract["command"] = command
    if not any(contracts):
        return _section("Contract", f'<p class="quiet">There is no {CONTRACT_FILE}, so the contract is not known.</p>')
    names = list(dict.fromkeys(name for contract in contracts for name in contract))
    texts = {name: [value_text(contract.get(name)) for contract in contracts] for name in names}
    if len(runs) == 1:
        return _section("Contract", _table(["field", "value"], [[name, *texts[name]] for name in names]))
    changed = {change.field for c in report.comparisons for change in c.changes}
    breaking = {change.field for c in report.comparisons for change in c.changes if change.breaks}
    parts = "" if changed else "<p>The contracts are equal in everything that decides the bits.</p>"
    if changed:
        rows, classes = [], []
        for name in sorted(changed, key=lambda name: (name not in breaking, name)):
            breaks = name in breaking
            tag = f"decides {decides(name)}" if breaks else "does not decide the bits"
            cells = texts.get(name) or [value_text(None)] * len(runs)
            label = f'<span class="tag {"bad" if breaks else "mild"}">{escape(tag)}</span>'
            rows.append([*map(escape, (name, *cells)), label])
            classes.append("breaks" if breaks else "")
        parts += _table(["differs", *(run.name for run in runs), ""], rows, html=ALL, classes=classes)
    equal = [name for name in names if name not in changed and len(set(texts[name])) == 1]
    other = [[name, *texts[name]] for name in names if name not in changed and name not in equal]
    if other:
        parts += _table(["not compared", *(run.name for run in runs)], other)
    parts += _table(["the same in all", "value"], [[name, texts[name][0]] for name in equal])
    return _section("Contract", parts)


def _footer(report: RunReport) -> str:
    folders = ", ".join(str(run.folder) for run in report.runs[:8]) + (" …" if len(report.runs) > 8 else "")
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Written by samestep {__version__} on {now} from {escape(folders)}."


def _finding(finding: Finding, before: str = "") -> str:
    sign, word = SIGNS[finding.verdict]
    signs = f'<span aria-hidden="true">{sign}</span><span class="unseen">{word}: </span>'
    return f'<li class="{finding.verdict}">{signs}{before}{escape(finding.text)}</li>'


def _swatched(name: str, color: str) -> str:
    return f'<span class="name"><span class="swatch" style="background: var(--{color})"></span>{escape(name)}</span>'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>"


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Collection[int] = (),
    html: Collection[int] = (),
    caption: str = "",
    classes: Sequence[str] = (),
) -> str:
    """A table; columns of `html` are HTML already, all others are escaped."""
    style = [' class="number"' if i in numeric else ' class="text"' for i in range(len(titles))]
    heads = "".join(
        f'<th scope="col"{s if "number" in s else ""}>{escape(t)}</th>' for t, s in zip(titles, style, strict=True)
    )
    body = []
    for row, kind in zip(rows, classes or [""] * len(rows), strict=True):
        cells = [cell if i in html else escape(cell) for i, cell in enumerate(row)]
        rest = "".join(f"<td{s}>{cell}</td>" for s, cell in zip(style[1:], cells[1:], strict=True))
        body.append(f'<tr{f" class={kind}" if kind else ""}><th scope="row"{style[0]}>{cells[0]}</th>{rest}</tr>')
    tall = " tall" if len(rows) > TALL else ""
    label = escape(caption or f"Table of {titles[0]}")
    caption = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{label}"><table>{caption}'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


SCRIPTS = ("scales.js", "marks.js", "drawing.js", "page.js")
MAX_MARKS = 400  # events that are marked on the curves, of all runs


def make_page(report: RunReport) -> str:
    """The page as HTML text, below a megabyte.

    All text of a run is escaped; besides, the page forbids itself all scripts but its own and all requests.
    """
    script = '(() => {\n"use strict";\n' + "\n".join(map(_template, SCRIPTS)) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    makers = (_header, _summary, _proof, _time, _epochs, _events, _contract, _footer)
    parts = {
        "title": escape(f"{', '.join(run.name for run in report.runs)} · samestep report"),
        "script_hash": f"'sha256-{digest}'",
        "style": _template("page.css"),
        **{maker.__name__.removeprefix("_"): maker(report) for maker in makers},
        "data": _safe_json(_data(report)),
        "script": script,
    }
    # In one pass: what looks like a place in a run's own text is not filled.
    return visible(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template("page.html")))


def _data(report: RunReport) -> dict[str, Any]:
    """The data that the script draws."""
    charts = [_chart(chart) for chart in make_charts(report)]
    if len(charts) % 2 == 0 and len(charts) > 1:
        charts[-1]["whole"] = True  # a narrow one that would be alone in its row takes the whole of it
    runs = zip(report.runs, line_dashes(report), strict=True)
    return {
        "runs": [_run(run) | {"dash": " ".join(map(str, dash))} for run, dash in runs],
        "events": _marked_events(report),
        "charts": charts,
    }


def _run(run: RunSummary) -> dict[str, Any]:
    return {
        "name": run.name,
        "first": min((int(curve.steps[0]) for curve in run.curves.values() if len(curve)), default=0),
        "last": run.num_steps,
    }


def _marked_events(report: RunReport) -> list[dict[str, Any]]:
    """The events to be marked; of too many every so many, of checkpoints and of the others."""
    marked, checkpoints = [], []
    for index, run in enumerate(report.runs):
        for event in run.events:
            mark = {"run": index, "step": event.step, "name": event.name, "label": event.label}
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
        rows = [[float(f"{value:.5g}") for value in row] for row in phases.seconds.tolist()]
        stack = {"run": run, "names": phases.names, "x": phases.steps.tolist(), "rows": rows}
    return vars(chart) | {
        "whole_numbers": chart.key == "world_size",
        "whole": chart.key == "loss",
        "summary": _chart_summary(chart),
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


def _chart_summary(chart: Chart) -> str:
    """A sentence for screen readers."""
    if chart.stack is not None:
        return ", ".join(f"{name} {100 * share:.0f} %" for name, share in chart.stack[1].shares.items()) + "."
    curves = [series.curve for series in chart.series if series.style != "faint"]
    texts = [f"{number(float(curve.values[0]))} to {number(curve.last)}" for curve in curves[:6] if len(curve)]
    return f"From first to last: {'; '.join(texts)}." if texts else ""


def _safe_json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _template(name: str) -> str:
    return files("samestep.report").joinpath("page", name).read_text(encoding="utf-8")
