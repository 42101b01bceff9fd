"""The sections of the page around its curves: text and tables as HTML, everything from a run escaped."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from samestep.report.facts import Finding
from samestep.report.story import RunStory, Story
from samestep.report.words import (
    duration,
    epoch_rows,
    flat,
    headline_metric,
    number,
    size,
    train_loss,
    value_text,
)
from samestep.train.agreement import decides
from samestep.train.naming import CONTRACT_FILE
from samestep.version import __version__

SIGNS = {"holds": ("✓", "Holds"), "fails": ("✕", "Fails"), "note": ("·", "Note")}
TALL = 15  # rows from which a table scrolls by itself
MAX_EVENTS = 300
MAX_EPOCHS = 1000


def header(story: Story) -> str:
    """Title, and what was run, in a sentence."""
    runs = story.runs
    first = runs[0]
    if len(runs) == 1:
        names, lead = first.name, first.title
    else:
        names = f"{', '.join(run.name for run in runs[:-1])} and {runs[-1].name}" if len(runs) < 5 else ""
        names = names or f"{first.name} and {len(runs) - 1} other runs"
        titles = list(dict.fromkeys(run.title for run in runs))
        lead = titles[0] if len(titles) == 1 else f"{len(runs)} runs of {len(titles)} kinds"
    terms = f"<br>{escape(first.terms)}" if first.terms and len({run.terms for run in runs}) == 1 else ""
    return f'<p class="over">samestep report</p>\n<h1>{escape(names)}</h1>\n<p class="lead">{escape(lead)}{terms}</p>'


def summary(story: Story) -> str:
    """The figures of one run; of several, a table of them."""
    return _figures(story.runs[0]) if len(story.runs) == 1 else _runs_table(story)


def proof(story: Story) -> str:
    """What the ledgers prove."""
    parts = []
    if story.comparisons:
        items = [(f"{c.first} and {c.other}", c.finding) for c in story.comparisons]
        rows = [_finding(finding, f"<strong>{escape(names)}</strong>: ") for names, finding in items]
        parts.append(f'<ul class="findings">{"".join(rows)}</ul>')
    alone = []
    for run in story.runs:
        title = f"<h3>{escape(run.name)}</h3>" if story.comparisons else ""
        alone.append(f'{title}<ul class="findings">{"".join(map(_finding, run.findings))}</ul>')
    if story.comparisons:
        fails = any(finding.verdict == "fails" for run in story.runs for finding in run.findings)
        opened = " open" if fails else ""
        alone = [f"<details{opened}><summary>Each run by itself</summary>", *alone, "</details>"]
    parts += alone
    return _section("What the ledger proves", "".join(parts))


def time(story: Story) -> str:
    """Where the time goes, a bar a run, with the numbers in a table."""
    runs = [run for run in story.runs if run.phases.shares]
    if not runs:
        return ""
    names = list(dict.fromkeys(name for run in runs for name in run.phases.shares))
    parts = []
    for run in runs:
        spans = [
            f'<span style="flex-grow: {share:.5f}; background: var(--part-{names.index(name) % 6})"></span>'
            for name, share in run.phases.shares.items()
            if share > 0
        ]
        title = f"<h3>{escape(run.name)}</h3>" if len(story.runs) > 1 else ""
        parts.append(f'{title}<div class="bar" aria-hidden="true">{"".join(spans)}</div>')
    several = len(runs) > 1
    titles = ["phase", *(column for run in runs for column in _time_titles(run, several))]
    rows = []
    for position, name in enumerate(names):
        swatch = f'<span class="swatch" style="background: var(--part-{position % 6})"></span>'
        cells = [f'<span class="name">{swatch}{escape(name)}</span>']
        for run in runs:
            share = run.phases.shares.get(name)
            totals = dict(zip(run.phases.names, run.phases.totals.tolist(), strict=True))
            steps = max(1, int(run.phases.steps[-1]))
            cells += ["-" if share is None else f"{100 * share:.1f} %"]
            cells += [] if several else [_milliseconds(totals[name] / steps), duration(totals[name])]
        rows.append(cells)
    note = '<p class="quiet">Mean host seconds of each step, as measured about once a second.</p>'
    return _section("Where the time goes", "".join(parts) + _table(titles, rows, numeric=range(1, 99), html={0}) + note)


def epochs(story: Story) -> str:
    """The table of epochs, one a run."""
    parts = []
    for run in story.runs:
        titles, rows = epoch_rows(run)
        if not rows:
            continue
        left_out = len(rows) - MAX_EPOCHS
        caption = run.name if len(story.runs) > 1 else ""
        parts.append(_table(titles, rows[-MAX_EPOCHS:], numeric=range(len(titles)), caption=caption))
        if left_out > 0:
            parts.append(f'<p class="quiet">The {left_out:,} epochs before are left out here.</p>')
    return _section("Epochs", "".join(parts)) if parts else ""


def events(story: Story) -> str:
    """The table of events."""
    rows = []
    for run in story.runs:
        for event, seconds in zip(run.events, run.clock.event_seconds, strict=True):
            moment = "-" if event.time is None else event.time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
            rows.append((event, [f"{event.step:,}", duration(seconds), moment, run.name, event.sentence]))
    if not rows:
        return _section("Events", '<p class="quiet">The ledger tells of none.</p>')
    note = ""
    if len(rows) > MAX_EVENTS:
        kept = [row for row in rows if row[0].name != "checkpoint"][:MAX_EVENTS]
        note = f'<p class="quiet">{len(rows) - len(kept):,} more events, checkpoints above all, are left out here.</p>'
        rows = kept
    titles = ["step", "under way", "time (UTC)", "run", "what happened"]
    texts = [cells for _, cells in rows]
    if len(story.runs) == 1:
        titles.remove("run")
        texts = [[*cells[:3], cells[4]] for cells in texts]
    return _section("Events", _table(titles, texts, numeric=(0, 1)) + note)


def contract(story: Story) -> str:
    """The contract; of several runs, what differs first."""
    runs = story.runs
    fields = [flat(run.contract) for run in runs]
    if not any(fields):
        return _section("Contract", f'<p class="quiet">There is no {CONTRACT_FILE}, so the contract is not known.</p>')
    changed = {change.field: change.breaks for c in story.comparisons for change in c.changes}
    breaking = {change.field for c in story.comparisons for change in c.changes if change.breaks}
    parts = []
    if len(runs) > 1:
        if changed:
            rows, marks = [], []
            for name in sorted(changed, key=lambda name: (name not in breaking, name)):
                tag = ("bad", f"decides {decides(name)}") if name in breaking else ("mild", "does not decide the bits")
                cells = [escape(name), *(escape(value_text(each.get(name))) for each in fields)]
                rows.append([*cells, f'<span class="tag {tag[0]}">{escape(tag[1])}</span>'])
                marks.append("breaks" if name in breaking else "")
            titles = ["differs", *(run.name for run in runs), ""]
            parts.append(_table(titles, rows, html=range(len(titles)), classes=marks))
        else:
            parts.append("<p>The contracts are equal in everything that decides the bits.</p>")
    names = [name for name in dict.fromkeys(name for each in fields for name in each) if name not in changed]
    if len(runs) == 1:
        rows = [[name, value_text(fields[0].get(name))] for name in names]
        parts.append(_table(["field", "value"], rows))
    else:
        same = [name for name in names if len({value_text(each.get(name)) for each in fields}) == 1]
        other = [name for name in names if name not in same]
        if other:
            rows = [[name, *(value_text(each.get(name)) for each in fields)] for name in other]
            parts.append(_table(["not compared", *(run.name for run in runs)], rows))
        parts.append(_table(["the same in all", "value"], [[name, value_text(fields[0].get(name))] for name in same]))
    return _section("Contract", "".join(parts))


def footer(story: Story) -> str:
    """Where it came from."""
    folders = ", ".join(str(run.folder) for run in story.runs[:8]) + (" …" if len(story.runs) > 8 else "")
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Written by samestep {__version__} on {now} from {escape(folders)}."


def _figures(run: RunStory) -> str:
    figures = [("state", escape(run.state)), ("steps", f"{run.num_steps:,}")]
    figures += [("epochs", f"{max(run.epochs):,}")] if run.epochs else []
    loss = train_loss(run)
    figures += [("train loss", number(loss))] if loss is not None else []
    metric = headline_metric(run)
    figures += [(f"{escape(metric[0])} (eval)", number(metric[1]))] if metric else []
    figures += [("samples a second", number(run.throughput))] if run.throughput else []
    figures += [("under way", duration(run.clock.duration))] if run.clock.duration else []
    figures += [("ran on", escape(run.devices))] if run.devices else []
    figures += [(f"{name} memory, at most", size(value)) for name, value in run.memory.items()]
    cells = [f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures]
    if run.digest:
        cells.append(
            f'<div class="wide"><dt>digest of the final state</dt><dd><code>{escape(run.digest)}</code></dd></div>'
        )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def _runs_table(story: Story) -> str:
    metrics = list(dict.fromkeys(tag for run in story.runs for tag in run.eval_tags))
    shown = sorted(metrics, key=lambda tag: tag == "loss/eval")[:4]
    titles = ["run", "state", "steps", "train loss", *(f"{t.removesuffix('/eval')} (eval)" for t in shown)]
    titles += ["samples/s", "under way", "ran on", "digest"]
    rows = []
    for position, run in enumerate(story.runs):
        swatch = f'<span class="swatch" style="background: var(--run-{position % 6})"></span>'
        cells = [f'<span class="name">{swatch}{escape(run.name)}</span>', escape(run.state), f"{run.num_steps:,}"]
        cells += [number(train_loss(run))]
        cells += [number(run.curves[tag].last) if tag in run.curves else "-" for tag in shown]
        cells += [number(run.throughput), duration(run.clock.duration), escape(run.devices or "-")]
        digest = f'<code title="{escape(run.digest)}">{escape(run.digest[:8])}…</code>' if run.digest else "-"
        rows.append([*cells, digest])
    numeric = range(2, 6 + len(shown))
    return f'<section class="runs">{_table(titles, rows, numeric=numeric, html=range(len(titles)))}</section>'


def _finding(finding: Finding, before: str = "") -> str:
    sign, word = SIGNS[finding.verdict]
    signs = f'<span aria-hidden="true">{sign}</span><span class="unseen">{word}: </span>'
    return f'<li class="{finding.verdict}">{signs}{before}{escape(finding.text)}</li>'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>"


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[int] = (),
    html: Sequence[int] | set[int] = (),
    caption: str = "",
    classes: Sequence[str] = (),
) -> str:
    """A table; columns of `html` are HTML already, all else is escaped."""
    style = [' class="number"' if i in numeric else ' class="text"' for i in range(len(titles))]
    heads = "".join(
        f'<th scope="col"{s if "number" in s else ""}>{escape(t)}</th>' for t, s in zip(titles, style, strict=True)
    )
    body = []
    for row, kind in zip(rows, classes or [""] * len(rows), strict=True):
        cells = [cell if i in html else escape(cell) for i, cell in enumerate(row)]
        first = f'<th scope="row"{style[0]}>{cells[0]}</th>'
        rest = "".join(f"<td{style[i]}>{cell}</td>" for i, cell in enumerate(cells) if i)
        body.append(f"<tr{f' class={kind}' if kind else ''}>{first}{rest}</tr>")
    tall = " tall" if len(rows) > TALL else ""
    focus = f' tabindex="0" role="region" aria-label="{escape(caption or f"Table of {titles[0]}")}"'
    caption = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll{tall}"{focus}><table>{caption}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _time_titles(run: RunStory, several: bool) -> list[str]:
    return [run.name] if several else ["share", "a step", "in all"]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
