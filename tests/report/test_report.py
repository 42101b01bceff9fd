"""The report: what it tells of runs that finished, broke off or go on, and that its page is whole, safe and small."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_runs import BEGIN, MadeRun, eventful, make_run
from rich.console import Console
from typer.testing import CliRunner

from samestep.cli.main import app
from samestep.errors import UsageError
from samestep.report.formatting import optimizer_text
from samestep.report.page import loss_table, make_charts, make_page
from samestep.report.run_summary import distinct_names, make_report
from samestep.report.terminal import print_report
from samestep.runs.curves import Curve, loss_figure, smoothed, thinned
from samestep.runs.ledger import from_line, to_line


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.scripts, self.attributes = [], [], [], []
        self._inside = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self):
        return json.loads(self.scripts[0])


def page_of(*folders):
    return Page(make_page(make_report(folders)))


def figure_of(*folders):
    runs = make_report(folders).runs
    return loss_figure([run.name for run in runs], loss_table(runs))


def printed(*folders, width=120):
    console = Console(width=width, highlight=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_report(make_report(folders), console)
    return console.export_text()


def texts(run):
    return [(finding.verdict, finding.text) for finding in run.findings]


def test_a_finished_run_is_told_with_its_figures(tmp_path):
    (run,) = make_report([make_run(tmp_path / "lenet-1")]).runs
    assert (run.name, run.state, run.num_steps, run.world_sizes) == ("lenet-1", "finished", 60, (3,))
    assert run.digest == "0" * 64
    assert sorted(run.epochs) == [1, 2, 3, 4, 5]
    assert run.epochs[5]["accuracy/eval"] == run.curves["accuracy/eval"].last
    assert run.title == "python -m samestep.recipes.lenet"
    assert run.terms == "128 samples a step = 8 microbatches · sgd, lr 0.05 · seed 0 · 32-true · cpu"
    assert run.seconds == pytest.approx(60 * 0.0345, rel=0.2)
    assert sum(run.phases.shares.values()) == pytest.approx(1)
    assert run.phases.shares["compute"] == pytest.approx(0.6, abs=0.06)
    assert run.memory["host"] > 4e8
    assert run.begun == "2026-01-31 12:00 UTC"


def test_the_header_of_a_scripts_run_has_its_command_and_its_optimizer_in_words(tmp_path):
    folder = make_run(tmp_path / "mine")
    contract = json.loads((folder / "run.json").read_text())
    for name in ("data", "lr", "momentum"):
        del contract[name]
    contract["command"] = ["python", "train.py", "--note", "two words"]
    contract["optimizer"] = {"class": "SGD", "lr": 0.1, "momentum": 0, "weight_decay": 0.01, "foreach": None}
    (folder / "run.json").write_text(json.dumps(contract))
    (run,) = make_report([folder]).runs
    assert run.title == "python train.py --note 'two words'"
    words = "128 samples a step = 8 microbatches · SGD, lr 0.1, weight decay 0.01 · seed 0 · 32-true · cpu"
    assert run.terms == words
    header = printed(folder).split("epoch  ")[0]
    assert all(text in header for text in (run.title, words, "begun 2026-01-31 12:00 UTC", "finished"))
    assert "{" not in header
    page = page_of(folder).text
    assert run.title in page
    assert words in page
    assert "python, train.py" not in page


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("adam", "adam, lr -"),
        ({"class": "SGD", "lr": 0.00019999999999999966}, "SGD, lr 0.0002"),
        ({"class": "Adam", "group_0": {"lr": 0.1}, "group_1": {"lr": 0.2}}, "Adam, lr 0.1 and 0.2"),
        (
            {"0": {"class": "SGD", "lr": 1.0, "momentum": 0.9}, "1": {"class": "Muon", "lr": 0.02}},
            "SGD, lr 1, momentum 0.9 and Muon, lr 0.02",
        ),
    ],
)
def test_an_optimizer_is_told_in_words(optimizer, text):
    assert optimizer_text(optimizer) == text


def test_the_phases_are_weighed_by_the_steps_that_they_stand_for(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(steps=4, timed=False))
    lines = [
        {"step": 1, "seconds/data": 1.0, "seconds/compute": 0.0},
        {"step": 4, "seconds/data": 0.0, "seconds/compute": 1.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = make_report([folder]).runs
    assert run.phases.totals.tolist() == [1.0, 3.0]
    assert run.phases.shares == {"data": 0.25, "compute": 0.75}


def test_the_ledger_of_a_sound_run_proves_that_nothing_is_missing(tmp_path):
    (run,) = make_report([make_run(tmp_path / "run")]).runs
    assert [verdict for verdict, _ in texts(run)] == ["holds", "holds", "note"]
    assert texts(run)[0][1] == "60 steps are recorded, none is missing."
    assert "7,680 samples" in texts(run)[1][1]


def test_steps_that_were_done_again_are_counted_and_compared(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(resume_from=(40, 30)))
    (run,) = make_report([folder]).runs
    assert ("holds", "10 steps were done again after a resume, with the same bits each time.") in texts(run)
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"step": 33' in line)
    lines[place] = to_line(from_line(lines[place].encode()) | {"loss": (1.0).hex()}).decode().rstrip()
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    (changed,) = make_report([folder]).runs
    assert any(verdict == "fails" and text.startswith("Step 33 was done again") for verdict, text in texts(changed))


@pytest.mark.parametrize(
    ("change", "words"), [("lost", "1 step is missing"), ("twice", "used twice"), ("gap", "left out")]
)
def test_a_ledger_with_a_fault_does_not_pass(tmp_path, change, words):
    folder = make_run(tmp_path / "run")
    entries = [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    at = next(i for i, entry in enumerate(entries) if entry.get("step") == 20 and "event" not in entry)
    if change == "lost":
        del entries[at]
    else:
        entries[at]["position"] += {"twice": -1, "gap": 1}[change]
    (folder / "ledger.jsonl").write_bytes(b"".join(map(to_line, entries)))
    (run,) = make_report([folder]).runs
    assert any(verdict == "fails" and words in text for verdict, text in texts(run))


def test_runs_of_one_contract_are_found_to_be_the_same_to_the_bit(tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", MadeRun(speed=2, events=eventful(60)))]
    (comparison,) = make_report(folders).comparisons
    assert comparison.changes == ()
    assert comparison.finding.verdict == "holds"
    assert comparison.finding.text.startswith("Same bits for all 60 steps. Compared in each: sample ids, loss, ")
    assert "learning rate; after 6 steps the state, by a checksum." in comparison.finding.text
    assert comparison.finding.text.endswith("Both ended in the same state, by its digest.")
    assert "Same bits for all 60 steps" in page_of(*folders).text
    assert "Same bits for all 60 steps" in printed(*folders, width=300)


def test_other_bits_under_another_contract_are_no_failure_and_the_field_is_named(tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", MadeRun(seed=1))]
    (comparison,) = make_report(folders).comparisons
    assert [(change.field, change.breaks) for change in comparison.changes] == [("seed", True)]
    assert comparison.finding.verdict == "note"
    assert "The contracts differ (seed)" in comparison.finding.text
    page = page_of(*folders)
    assert "kinds" not in page.text
    assert "decides the order of the samples" in page.text
    assert ("class", "breaks") in page.attributes


def test_a_resume_hours_later_adds_nothing_to_the_time_of_training(tmp_path):
    (run,) = make_report([make_run(tmp_path / "run", MadeRun(resume_from=(40, 30)))]).runs
    assert run.seconds < 60 * 0.06
    resume = next(event for event in run.events if event.name == "resume")
    assert resume.sentence == "resumed from step-00000030 on 2 devices"


def test_the_time_goes_by_the_phases_and_without_those_by_the_throughput(tmp_path):
    for timed in (True, False):
        (run,) = make_report([make_run(tmp_path / str(timed), MadeRun(timed=timed))]).runs
        assert run.seconds == pytest.approx(60 * 0.0345, rel=0.15)
    (run,) = make_report([make_run(tmp_path / "run", MadeRun(timed=False, epoch_steps=100))]).runs
    assert run.seconds is None


def test_all_events_are_told_in_words_with_their_step(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(events=eventful(60)))
    told = page_of(folder).text
    assert "rank 2 (cpu) died in backward: SIGKILL" in told
    assert "rank 1 (cpu) hung in exchange and was ended" in told
    assert "went on with 2 devices without rank 2 after 0.8 s" in told
    assert "settings changed: versions.numpy 2.4.5 → 2.4.6" in told
    assert all("3 → … → 3 devices, 1 to 3" in text for text in (told, printed(folder)))
    marks = page_of(folder).data["events"]
    assert sum(not mark["quiet"] for mark in marks) == 10
    assert sum(mark["name"] == "checkpoint" for mark in marks) == 2


def test_nan_and_infinite_losses_are_gaps_and_are_named(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(nonfinite={5: "nan", 6: "inf"}))
    data = page_of(folder).data
    (steps,) = [series for series in data["charts"][0]["series"] if series["style"] == "faint"]
    assert steps["bad"] == [[6, "NaN"], [7, "inf"]]
    assert steps["y"][5] is None
    assert steps["y"][6] is None
    assert all(value is not None for series in data["charts"][0]["series"][1:] for value in series["y"][8:])
    assert ("note", "2 steps changed nothing: a loss or gradient was not finite.") in texts(
        make_report([folder]).runs[0]
    )
    assert figure_of(folder).axes


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_hardly_any_steps_is_told_whole(tmp_path, steps):
    folder = make_run(tmp_path / "run", MadeRun(steps=steps, epoch_steps=1))
    page = page_of(folder)
    assert "What the ledger proves" in page.text
    assert ("1 step" in printed(folder)) is (steps == 1)
    assert len(figure_of(folder).axes) >= 1


@pytest.mark.parametrize("kept", [["run.json"], ["ledger.jsonl"], ["run.json", "metrics.jsonl"]])
def test_a_run_that_has_left_only_some_of_its_files_is_told_as_far_as_it_goes(tmp_path, kept):
    folder = make_run(tmp_path / "run", MadeRun(finished=False))
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    (run,) = make_report([folder]).runs
    assert run.state in ("running?", "crashed")
    assert run.digest is None
    assert page_of(folder).data["runs"][0]["name"] == "run"
    assert "run" in printed(folder)
    figure_of(folder)


def test_torn_lines_and_garbage_do_not_stop_a_report(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(finished=False))
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(
            to_line({"event": "death", "step": -3})
            + to_line({"event": "odd", "step": 60, "time": "soon", "x": [1]})
            + b'[1]\n{"step": '
        )
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"step": "x"}\n{"step": 60, "loss/train": {"a": 1}, "epoch": "inf"}\n{"ste')
    (folder / "run.json").write_text("{")
    (run,) = make_report([folder]).runs
    assert run.num_steps == 60
    assert any("cannot be trusted" in text for _, text in texts(run))
    assert any("unfinished" in text for _, text in texts(run))
    assert "odd: x [1]" in page_of(folder).text


def test_what_a_run_is_called_cannot_become_markup_or_script(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&"
    contract = {"options": {"a": evil, "[bold]b": "$x^{2"}, "data": evil}
    events = [("death", 3, {"rank": evil, "cause": evil})]
    folder = make_run(tmp_path / "<script>alert(1)<b>[red]$_{", MadeRun(contract=contract, events=events))
    other = make_run(tmp_path / "other", MadeRun(contract={"options": {"a": "<i>"}}))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + json.dumps({"step": 60, evil: 1.0, f"{evil}/eval": 2.0}) + "\n")
    plain = page_of(make_run(tmp_path / "plain"))
    for folders in ([folder], [other, folder]):
        page = page_of(*folders)
        assert page.tags.count("script") == plain.tags.count("script") == 2
        assert not {"img", "i", "b"} & set(page.tags)
        assert evil in page.text
        assert page.data["runs"][-1]["name"] == "<script>alert(1)<b>[red]$_{"
        assert "<script>alert(1)<b>[red]$_{" in printed(*folders)
    assert figure_of(other, folder).axes


def test_the_page_needs_nothing_else_and_forbids_itself_to_ask(tmp_path):
    text = make_page(make_report([make_run(tmp_path / "run")]))
    page = Page(text)
    (policy,) = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none';")
    assert "'sha256-" in policy
    assert "unsafe-inline'; script" not in policy.replace("style-src 'unsafe-inline'", "")
    assert not [value for name, value in page.attributes if name in ("src", "srcset", "action")]
    assert {value for name, value in page.attributes if name == "href"} == {"data:,", "#curves"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "{{" not in text.split('<script type="application/json"')[0]


def test_every_chart_and_table_of_an_eventful_run_is_there(tmp_path):
    page = page_of(make_run(tmp_path / "run", MadeRun(steps=120, events=eventful(120))))
    titles = [chart["title"] for chart in page.data["charts"]]
    assert titles == [
        "Loss", "Accuracy", "Gradient norm", "Learning rate", "Throughput", "Time of a step", "Host memory",
        "Device memory", "Devices",
    ]  # fmt: skip
    for heading in ("What the ledger proves", "Where the time goes", "Epochs", "Events", "Contract"):
        assert heading in page.text
    styles = [series["style"] for series in page.data["charts"][0]["series"]]
    assert styles == ["faint", "line", "dots"]


def test_what_a_checkpoint_held_a_step_up_is_a_chart_in_seconds(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(steps=24))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 24, "checkpoint/blocked_milliseconds": 2.5}) + "\n")
    chart = page_of(folder).data["charts"][-1]
    assert (chart["title"], chart["unit"]) == ("Step held up by a checkpoint", "seconds")
    assert chart["series"][0]["y"] == [0.0025]


def test_where_the_number_of_devices_is_not_everywhere_the_same_that_of_every_run_is_drawn(tmp_path):
    changed = make_run(tmp_path / "changed", MadeRun(steps=120, events=eventful(120)))
    constant, like_it = (make_run(tmp_path / name) for name in ("constant", "like-it"))

    def drawn(*folders):
        charts = [chart for chart in make_charts(make_report(folders)) if chart.title == "Devices"]
        return [
            [(series.run, sorted(set(series.curve.values.tolist()))) for series in chart.series] for chart in charts
        ]

    assert drawn(constant, changed) == [[(0, [3.0]), (1, [1.0, 2.0, 3.0])]]
    assert drawn(constant, like_it) == []


def test_runs_whose_lines_lie_on_each_other_are_dashed_so_that_both_are_seen(tmp_path):
    folders = [make_run(tmp_path / name, MadeRun(seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1), ("d", 0))]
    dashes = [run["dash"] for run in page_of(*folders).data["runs"]]
    assert dashes[0] == ""
    assert dashes[2] == ""
    assert dashes[1]
    assert dashes[3]
    assert dashes[1] != dashes[3]


def test_runs_of_one_name_are_called_by_as_much_of_their_path_as_tells_them_apart(tmp_path):
    folders = [make_run(tmp_path / a / "x" / "run") for a in ("one", "two")]
    assert [run.name for run in make_report(folders).runs] == ["one/x/run", "two/x/run"]
    assert [run.name for run in make_report([folders[0], folders[0] / ".." / "run"]).runs] == ["run"]
    assert distinct_names([Path("/a/b"), Path("/a/c")]) == ["b", "c"]


@pytest.mark.parametrize("make", ["nothing", "file", "folder"])
def test_a_folder_that_is_no_run_is_a_mistake_told_in_a_sentence(tmp_path, make):
    path = tmp_path / "x"
    if make == "file":
        path.write_text("")
    elif make == "folder":
        path.mkdir()
    with pytest.raises(UsageError, match=r"x is .*give the folder of a run, such as runs/NAME") as caught:
        make_report([path])
    assert caught.value.exit_code == 2


def test_thinning_keeps_every_spike_and_every_gap():
    values = np.ones(100_000)
    values[[12_345, 77_777]] = 50.0, -9.0
    values[[500, 501, 60_000]] = np.nan, np.inf, np.nan
    curve = thinned(Curve(np.arange(1, 100_001), values), 600)
    assert len(curve) <= 3 * 600
    assert {12_346, 77_778, 501, 60_001, 1, 100_000} <= set(curve.steps.tolist())
    assert curve.finite.max() == 50
    assert curve.finite.min() == -9
    short = Curve.of({step: float(step) for step in range(100)})
    assert thinned(short, 50) is short


def test_smoothing_neither_lags_nor_is_spoilt_by_what_is_not_finite():
    steps = np.arange(1000)
    values = steps.astype(float)
    values[500] = math.nan
    line = smoothed(Curve(steps, values))
    assert np.isnan(line.values[500])
    inner = np.r_[20:480, 520:980]
    np.testing.assert_allclose(line.values[inner], inner, atol=1e-9)
    assert abs(line.values[495] - 495) < 1
    huge = np.where(steps == 300, 1e300, 1.0)
    assert smoothed(Curve(steps, huge)).values[400] == 1.0


def test_a_long_run_gives_a_small_page(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(steps=8_000, epoch_steps=100, digest_every=1000, speed=10))
    report = make_report([folder])
    text = make_page(report)
    assert len(text.encode()) < 400_000
    charts = make_charts(report)
    assert max(len(series.curve) for chart in charts for series in chart.series) <= 2000


def command(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_page_and_picture_and_says_where(tmp_path):
    folder = make_run(tmp_path / "run")
    done = command(folder)
    assert done.exit_code == 0, done.output
    assert f"page     {folder / 'report.html'}" in done.output
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "\x1b[" not in done.output


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    done = command(make_run(tmp_path / "run"), "--output", tmp_path / "file" / "x")
    assert re.search(r"cannot write .*--output", str(done.exception))


def test_with_json_the_report_is_all_that_is_printed(tmp_path):
    folder = make_run(tmp_path / "run", MadeRun(nonfinite={59: "nan"}))
    done = command(folder, make_run(tmp_path / "other"), "--json", "--output", tmp_path / "out")
    report = json.loads(done.stdout, parse_constant=pytest.fail)
    assert [run["steps"] for run in report["runs"]] == [60, 60]
    assert report["runs"][0]["curves"]["loss/train"]["last"] == "nan"
    assert report["comparisons"][0]["ledger"]["verdict"] == "fails"
    assert report["page"] == str(tmp_path / "out" / "report.html")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["loss.png", "report.html"]
    assert not (folder / "report.html").exists()
    assert report["runs"][0]["events"][0]["time"] == BEGIN.isoformat(timespec="milliseconds")


def test_a_report_needs_no_torch(tmp_path):
    folder = make_run(tmp_path / "run")
    code = f"""
import sys
from pathlib import Path
from samestep.cli.report import report
assert not {{"torch", "matplotlib", "numpy"}} & set(sys.modules)
report([Path({str(folder)!r})])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert (folder / "report.html").exists()
