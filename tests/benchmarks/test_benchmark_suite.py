import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench
import growth
import page
import roster
import scores
import tables
from contest import EntrantError, busy_while_paused, contest
from roster import Entrant

BENCHMARKS = Path(bench.__file__).parent
# Two processes that count their steps in files; told "die", they do after the third step.
STEADY = """
import os, sys
from pathlib import Path
from gate import Gate
counts = Path(sys.argv[1])
child = os.fork()
gate = Gate(sys.argv[sys.argv.index("--gate") + 1], warm_up=3)
number = 0
while True:
    number += 1
    (counts / ("child" if child == 0 else "parent")).write_text(f"{os.getpid()} {number}")
    gate.step()
    if "die" in sys.argv and number == 4:
        raise SystemExit("out of patience")
"""
CONTEST = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from contest import contest, scratch
from roster import Entrant
steady = Entrant("steady", "steady", sys.argv[2], lambda _: [sys.executable])
with scratch() as folder, contest([(steady, 2)], [sys.argv[3]], folder) as (ready, failed):
    ready[0].take_turn(2)
    print("ready", flush=True)
    while True:
        time.sleep(0.1)  # a signal that comes just before a sleep interrupts none, and its handler runs after it
"""


@pytest.fixture
def steady(tmp_path):
    """An entrant that needs no torch."""
    (tmp_path / "steady.py").write_text(STEADY)
    return Entrant("steady", "steady", str(tmp_path / "steady"), lambda _: [sys.executable])


@pytest.fixture
def home(tmp_path):
    """A short folder for sockets, whose paths are limited."""
    folder = tmp_path / "c"
    folder.mkdir()
    return folder


def counts(folder):
    return {path.name: int(path.read_text().split()[1]) for path in folder.iterdir()}


def pids(folder):
    return [int(path.read_text().split()[0]) for path in folder.iterdir()]


def wait_until_gone(numbers):
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(n) and psutil.Process(n).status() != psutil.STATUS_ZOMBIE for n in numbers):
        assert time.monotonic() < deadline, "an entrant lives on"
        time.sleep(0.05)


def wait_until_stopped(numbers):
    deadline = time.monotonic() + 20
    while {psutil.Process(number).status() for number in numbers} != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < deadline, "it was not stopped"
        time.sleep(0.01)


def test_a_turn_lets_every_process_of_an_entrant_run_the_steps_it_was_given_and_no_more(tmp_path, home, steady):
    steps = tmp_path / "steps"
    steps.mkdir()
    with contest([(steady, 2)], [str(steps)], home) as (ready, failed):
        assert not failed
        assert counts(steps) == {"parent": 3, "child": 3}
        assert ready[0].take_turn(5) > 0
        assert counts(steps) == {"parent": 10, "child": 10}, "two steps are not timed, five are"
        assert busy_while_paused(ready, 0.2)[ready[0].name] < 50
        assert counts(steps) == {"parent": 10, "child": 10}
        running = pids(steps)
        assert {p.pid for p in ready[0].processes()} >= set(running)
    wait_until_gone(running)


def test_an_entrant_that_must_be_stopped_between_turns_goes_on_in_its_next_turn(tmp_path, home, steady):
    steps = tmp_path / "steps"
    steps.mkdir()
    with contest([(steady, 2)], [str(steps)], home) as (ready, _):
        ready[0].freeze()
        wait_until_stopped(pids(steps))
        ready[0].take_turn(1)
        assert counts(steps) == {"parent": 6, "child": 6}
        wait_until_stopped(pids(steps))


def test_an_entrant_that_dies_is_reported_with_its_last_words_and_the_others_go_on(tmp_path, home, steady):
    dying = dataclasses.replace(steady, name="dying", options=("die",))
    unknown = dataclasses.replace(steady, name="unknown", script=str(tmp_path / "no-such-script"))
    steps = tmp_path / "steps"
    steps.mkdir()
    with contest([(dying, 2), (unknown, 1), (steady, 2)], [str(steps)], home) as (ready, failed):
        assert [(entrant.name, count) for entrant, count, _ in failed] == [("unknown", 1)]
        assert "No such file" in failed[0][2]
        with pytest.raises(EntrantError, match=r"dying with 2 processes[\s\S]*out of patience"):
            ready[0].take_turn(5)
        assert ready[1].take_turn(5) > 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_entrant_outlives_a_benchmark_that_is_stopped(tmp_path, steady, signum):
    steps, temporary = tmp_path / "steps", tmp_path / "t"
    steps.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-c", CONTEST, str(BENCHMARKS), steady.script, str(steps)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        process.wait(timeout=30)
    wait_until_gone(pids(steps))
    if signum == signal.SIGINT:
        assert not list(temporary.iterdir())


def test_the_benchmark_runs_and_its_page_shows_the_numbers_of_its_json(tmp_path):
    results, temporary = tmp_path / "results", tmp_path / "t"
    temporary.mkdir()
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--quick", "--workloads", "W2", "--rounds", "1"]
    command += ["--entrants", "limit,plain,samestep", "--processes", "1", "--output", str(results)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not list(temporary.iterdir()), "sockets, data or folders were left"
    found = json.loads((results / "steps.json").read_text())
    assert set(found) == {*("facts", "settings", "workloads", "measurements", "left_out", "failed")}
    assert {"torch", "samestep"} <= set(found["facts"]["versions"])
    assert {entry["entrant"]: len(entry["microseconds"]) for entry in found["measurements"]} == {
        "limit": 1,
        "plain": 1,
        "samestep": 1,
    }
    assert not found["failed"]
    assert found["workloads"]["W2"]["parameters"] == 801
    assert "× PyTorch" in run.stdout

    assert page.main(["--results", str(results), "--docs", str(tmp_path)]) == 0
    written = (tmp_path / "benchmarks.md").read_text()
    plain = next(e["microseconds"][0] for e in found["measurements"] if e["entrant"] == "plain")
    for entry in found["measurements"]:
        (value,) = entry["microseconds"]
        assert f"| 1 | {value:,.0f} | {value / plain:.2f} |" in written
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")
    assert found["facts"]["cpu"] in written
    found["measurements"][0]["microseconds"] = [987654.0]
    (results / "steps.json").write_text(json.dumps(found))
    page.main(["--results", str(results), "--docs", str(tmp_path)])
    assert "987,654" in (tmp_path / "benchmarks.md").read_text()


def test_an_entrant_whose_package_is_not_installed_is_left_out_and_said_to_be(tmp_path, monkeypatch, capsys):
    absent = dataclasses.replace(roster.BY_NAME["accelerate"], package="no-such-package")
    monkeypatch.setitem(roster.BY_NAME, "accelerate", absent)
    assert bench.main(["--quick", "--workloads", "W2", "--entrants", "accelerate", "--output", str(tmp_path)]) == 0
    assert "left out: accelerate: no-such-package is not installed" in capsys.readouterr().out
    found = json.loads((tmp_path / "steps.json").read_text())
    assert found["left_out"] == [{"entrant": "accelerate", "reason": "no-such-package is not installed"}]
    assert "Accelerate (no-such-package is not installed)" in page.page({"steps": found})


@pytest.mark.skipif(not (BENCHMARKS.parent / ".git").exists(), reason="needs the repository of samestep")
def test_a_commit_takes_part_beside_the_working_tree_and_leaves_nothing(tmp_path, capsys):
    listing = ["git", "-C", str(BENCHMARKS.parent), "worktree", "list"]
    command = ["--quick", "--workloads", "W2", "--entrants", "samestep", "--processes", "1", "--against", "HEAD"]
    assert bench.main([*command, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "steps.json").read_text())
    assert {entry["entrant"] for entry in found["measurements"]} == {"samestep", "samestep@HEAD"}
    del roster.BY_NAME["samestep@HEAD"]
    assert "now, over HEAD" in capsys.readouterr().out
    assert b"bench-" not in subprocess.run(listing, capture_output=True, check=True).stdout


def test_unknown_names_are_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--workloads", "W9"])
    assert "got W9; there are W1, W2, W3, W4" in capsys.readouterr().err


def test_ratios_are_taken_round_by_round():
    # The rounds' ratios are 0.5, 1 and 1; the ratio of the medians would be 0.5, that of the sums 6 / 7.
    assert scores.ratio([1.0, 4.0, 1.0], [2.0, 4.0, 1.0]) == scores.Spread(1.0, 0.5, 1.0)


def made_up(**microseconds):
    """The results of all entrants on W1, 1,000 µs a step each, but for those named."""
    measurements = [
        {"workload": "W1", "entrant": e.name, "processes": n, "microseconds": [microseconds.get(e.name, 1000.0)]}
        for e in roster.ROSTER
        for n in e.counts
    ]
    facts = {"date": "today", "cpu": "a cpu", "cores": 2, "system": "Linux", "python": "3", "load_at_start": 0.0}
    facts["versions"] = {"torch": "2"}
    workloads = {"W1": {"title": "LeNet", "parameters": 5, "global_batch_size": 256}}
    told = {"facts": facts, "settings": {"rounds": 1}, "workloads": workloads, "left_out": [], "failed": []}
    return {**told, "measurements": measurements}


def test_a_workload_has_each_tool_by_default_first_and_then_pairs_on_equal_terms():
    steps = made_up(plain=1600.0, **{"samestep-map": 2400.0, "samestep-v2-map": 800.0})
    default, equal = page.workload_section(steps, "W1").split("| by default |")[1].split("| samestep |")
    for title in ("PyTorch (DataLoader, DDP)", "Accelerate", "Lightning Trainer", "**samestep, 8 microbatches**"):
        assert default.count(f"| {title} |") == 2, "on one process and on two"
    assert default.count("| **samestep, 8 microbatches, map-style** | 2 | 2,400 | 1.50 |") == 1
    assert "micro-batches" not in default
    assert "| **2 microbatches, map-style dataset** | 2 | 800 | PyTorch (DataLoader, DDP) | 1,600 | 0.50 |" in equal
    assert equal.count("| PyTorch, 8 micro-batches |") == 2
    assert equal.count("| **") == len(scores.PAIRS)


def test_a_tool_by_default_that_was_not_measured_is_named():
    steps = made_up()
    assert page.absentees(steps) == []
    steps["measurements"] = [e for e in steps["measurements"] if (e["entrant"], e["processes"]) != ("samestep", 1)]
    assert page.absentees(steps) == ["Left out: samestep, 8 microbatches, processes: 1 (not measured).\n"]


def test_the_chart_has_the_tools_and_its_machine(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    close, pyplot.close = pyplot.close, kept.append
    try:
        page.draw(made_up(), tmp_path / "chart.png")
    finally:
        pyplot.close = close
    figure = kept[0]
    plain, peers, _, _ = (text.get_text() for text in figure.legends[0].get_texts())
    defaults = [entrant for entrant in roster.ROSTER if entrant.is_default]
    assert [plain, *peers.split(", ")] == [e.title for e in defaults if e.role == "peer"]
    assert figure.get_suptitle() == "today: a cpu, 2 cores, torch 2"
    assert [axis.get_title(loc="left").partition(":")[0] for axis in figure.axes] == ["both cores", "one process"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["W1: LeNet"]
    assert [text.get_text() for text in figure.axes[1].texts] == ["1.00", "1.00"], "a number for each of samestep's"
    close(kept[0])


def test_the_short_benchmark_is_that_of_the_tools_by_default():
    options = bench.read_options(["--short"])
    assert options.entrants == [entrant.name for entrant in roster.ROSTER if entrant.is_default]
    assert {"plain", "samestep", "samestep-map"} < set(options.entrants)
    assert (options.processes, options.rounds) == ([1, 2], 3)


def test_growth_has_a_slope_of_its_own_and_one_of_pytorch():
    assert scores.slope([1, 10, 100, 1000], [5.0, 5.0, 7.0, 700.0]) == pytest.approx(2.0), "the larger half"
    sizes = [1, 10, 100, 1000]
    points = {str(n): {"pytorch": [50.0 + n], "samestep": [50.0 + n**1.5]} for n in sizes}
    points["2000"] = {"samestep": [100.0]}
    growth = {
        "tensors": {"1 microbatch": points},
        "ranks": {"W1": {str(n): {"pytorch": [n], "samestep": [n]} for n in sizes}},
    }
    _, rows = tables.slope_table(growth)
    assert rows[0][:3] == ["tensors", "1 microbatch", "1 to 2,000"]
    assert rows[1] == ["ranks", "W1", "1 to 1,000", "1.00", "1.00", "+0.00 to +0.00", "no steeper"]
    del points["2000"]
    assert tables.slope_table(growth)[1][0][-1] == "**steeper**"


def test_growth_runs_and_its_page_shows_its_numbers(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "growth.py"), "--quick", "--only", "tensors,samples"]
    run = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    growth = json.loads((tmp_path / "growth.json").read_text())
    assert set(growth["growth"]["tensors"]["8 microbatches"]) == {"1", "10"}
    written = page.page({"growth": growth})
    assert tables.markdown(tables.slope_table(growth["growth"])) in written
    for who in ("pytorch", "samestep"):
        assert f"{growth['growth']['tensors']['8 microbatches']['10'][who][0]:,.0f}" in run.stdout


def test_pytorch_in_micro_batches_makes_the_step_of_the_whole_batch():
    models = []
    workload = dataclasses.replace(growth.chain(3), make_model=lambda: models.append(growth.Chain(3)) or models[-1])
    for count in (1, 8):
        torch.manual_seed(0)
        growth.plain_step(dataclasses.replace(workload, make_optimizer=partial(torch.optim.SGD, lr=0.1)), count)()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)
        assert (one != 1).any()


def test_the_memory_of_a_loader_does_not_depend_on_how_many_samples_there_are():
    sizes = [growth.peak_bytes(growth.our_loader(1 << power)) for power in (16, 40)]
    assert sizes[1] <= 1.05 * sizes[0]
    assert growth.VirtualSamples(1 << 40)[1 << 39].shape == (13,)


@pytest.mark.slow  # three starts of a script
def test_a_script_is_measured_as_two_ranks_on_one_and_two_devices(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "ranks.py"), "--ranks", "2", "--rounds", "1", "--output", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    ways = json.loads((tmp_path / "ranks.json").read_text())["ranks"]["2"]
    assert all(value > 0 for found in ways.values() for values in found.values() for value in values)
    assert {*ways} >= {"cpu:1", "cpu:2"}


def test_the_documentation_has_the_published_figures_of_ranks():
    published = json.loads((BENCHMARKS / "results" / "ranks.json").read_text())["ranks"]
    page_text = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()
    assert tables.markdown(tables.ranks_table(published)) in page_text
    del published["64"]["torchrun"]
    assert "| torchrun, 64 processes | not run: no memory |" in tables.markdown(tables.ranks_table(published))


def test_a_page_without_measurements_says_so(tmp_path):
    assert page.main(["--results", str(tmp_path), "--docs", str(tmp_path)]) == 0
    assert "Nothing has been measured yet." in (tmp_path / "benchmarks.md").read_text()
