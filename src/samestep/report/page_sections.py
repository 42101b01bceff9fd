"""The sections of the page around its curves: text and tables as HTML, with all text of a run escaped."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from html import escape

from samestep.report.findings import Finding
from samestep.report.formatting import duration, flat, number, size, value_text
from samestep.report.run_summary import Report, RunSummary
from samestep.train.contract_diff import decides
from samestep.train.paths import CONTRACT_FILE
from samestep.version import __version__

SIGNS = {"holds": ("✓", "Holds"), "fails": ("✕", "Fails"), "note": ("·", "Note")}
TALL = 15  # rows from which a table scrolls by itself
MAX_EVENTS = 300
MAX_EPOCHS = 1000
ALL = range(99)  # columns


def make_sections(report: Report) -> dict[str, str]:
    """The sections by their names in page.html."""
    makers: tuple[Callable[[Report], str], ...] = (_header, _summary, _proof, _time, _epochs, _events, _contract)
    return {maker.__name__.removeprefix("_"): maker(report) for maker in (*makers, _footer)}


def _header(report: Report) -> str:
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


def _summary(report: Report) -> str:
    """The figures of one run; a table for several."""
    return _figures(report.runs[0]) if len(report.runs) == 1 else _runs_table(report)


def _figures(run: RunSummary) -> str:
    figures = [("state", run.state), ("steps", f"{run.num_steps:,}")]
    figures += [("epochs", f"{max(run.epochs):,}")] if run.epochs else []
    figures += [("train loss", number(run.train_loss))] if run.train_loss is not None else []
    figures += [(f"{run.metric[0]} (eval)", number(run.metric[1]))] if run.metric else []
    figures += [("samples a second", number(run.throughput))] if run.throughput else []
    figures += [("begun", run.begun)] if run.begun else []
    figures += [("under way", duration(run.time.duration))] if run.time.duration else []
    figures += [("ran on", run.devices)] if run.devices else []
    figures += [(f"{name} memory, at most", size(value)) for name, value in run.memory.items()]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    if run.digest:
        code = f"<code>{escape(run.digest)}</code>"
        cells += f'<div class="wide"><dt>digest of the final state</dt><dd>{code}</dd></div>'
    return f'<dl class="figures">{cells}</dl>'


def _runs_table(report: Report) -> str:
    metrics = list(dict.fromkeys(tag for run in report.runs for tag in run.eval_tags))
    shown = sorted(metrics, key=lambda tag: tag == "loss/eval")[:4]
    titles = ["run", "state", "steps", "train loss", *(f"{t.removesuffix('/eval')} (eval)" for t in shown)]
    titles += ["samples/s", "under way", "ran on", "digest"]
    rows = []
    for index, run in enumerate(report.runs):
        digest = f'<code title="{escape(run.digest)}">{escape(run.digest[:8])}…</code>' if run.digest else "-"
        evals = [number(run.curves[tag].last) if tag in run.curves else "-" for tag in shown]
        cells = [escape(run.state), f"{run.num_steps:,}", number(run.train_loss), *evals, number(run.throughput)]
        cells += [duration(run.time.duration), escape(run.devices or "-"), digest]
        rows.append([_swatched(run.name, f"run-{index % 6}"), *cells])
    return f'<section class="runs">{_table(titles, rows, numeric=range(2, 6 + len(shown)), html=ALL)}</section>'


def _proof(report: Report) -> str:
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


def _time(report: Report) -> str:
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


def _epochs(report: Report) -> str:
    parts = ""
    for run in report.runs:
        titles, rows = run.epoch_table()
        if rows:
            caption = run.name if len(report.runs) > 1 else ""
            parts += _table(titles, rows[-MAX_EPOCHS:], numeric=ALL, caption=caption)
        if len(rows) > MAX_EPOCHS:
            parts += f'<p class="quiet">The {len(rows) - MAX_EPOCHS:,} epochs before are left out here.</p>'
    return _section("Epochs", parts) if parts else ""


def _events(report: Report) -> str:
    found = [
        (run, event, seconds)
        for run in report.runs
        for event, seconds in zip(run.events, run.time.event_seconds, strict=True)
    ]
    if not found:
        return _section("Events", '<p class="quiet">The ledger holds none.</p>')
    shown, note = found, ""
    if len(found) > MAX_EVENTS:
        shown = [each for each in found if each[1].name != "checkpoint"][:MAX_EVENTS]
        left_out = len(found) - len(shown)
        note = f'<p class="quiet">{left_out:,} more events, checkpoints above all, are left out here.</p>'
    several = len(report.runs) > 1
    titles = ["step", "under way", "time (UTC)", *["run"] * several, "what happened"]
    rows = []
    for run, event, seconds in shown:
        moment = "-" if event.time is None else event.time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        rows.append([f"{event.step:,}", duration(seconds), moment, *[run.name] * several, event.sentence])
    return _section("Events", _table(titles, rows, numeric=(0, 1)) + note)


def _contract(report: Report) -> str:
    """The contract; for several runs the fields that differ first, those that decide the bits before all."""
    runs = report.runs
    contracts = [flat(run.contract) for run in runs]
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


def _footer(report: Report) -> str:
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
