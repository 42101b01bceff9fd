"""`supervise` from Python: results, lines, errors of functions."""

import math
import time
from dataclasses import asdict

import pytest

from samestep.devices.selection import select
from samestep.errors import RunFolderError, UsageError
from samestep.launcher.job import Job
from samestep.launcher.monitor import Display
from samestep.launcher.supervisor import supervise

pytestmark = pytest.mark.usefixtures("same_descriptors", "forks")


@pytest.mark.parametrize("lines_to", [pytest.param("stdout", marks=pytest.mark.slow), "stderr"])
def test_a_function_gives_rank_0s_json_and_its_lines_are_printed(capsys, lines_to):
    job = Job("function", "steps:report", kwargs={"values": [1, 2]}, lines_to=lines_to)
    outcome = supervise(job, select("cpu:2"))
    assert (outcome.exit_code, outcome.failure) == (0, None)
    assert outcome.result["sum"] == 3
    assert math.isnan(outcome.result["nan"])
    printed = capsys.readouterr()
    line = "epoch 1, [bold]loss 0.5[/bold]\n"
    assert printed == ((line, "") if lines_to == "stdout" else ("", line))


@pytest.fixture
def _slow_display(monkeypatch):
    """A supervisor that takes its time for a line, as on a busy machine."""
    import samestep.runs.run_log  # noqa: F401 - each worker would import it anew

    line = Display.line

    def show(display, text):
        time.sleep(0.02)
        line(display, text)

    monkeypatch.setattr(Display, "line", show)


@pytest.mark.usefixtures("_slow_display")
@pytest.mark.parametrize("relay", [False, True], ids=["inherited", "relayed"])
def test_lines_and_what_rank_0_prints_are_in_the_order_of_the_calls(capfd, relay):
    job = Job("function", "steps:print_between_lines", kwargs={"count": 20}, relay=relay)
    assert supervise(job, select("cpu:2")).exit_code == 0
    assert capfd.readouterr().out.split() == [str(number) for number in range(40)]


@pytest.mark.usefixtures("_slow_display")
def test_twin_lines_that_are_not_waited_for_come_late(capfd, monkeypatch):
    monkeypatch.setenv("STEPS_DO_NOT_WAIT", "1")
    job = Job("function", "steps:print_between_lines", kwargs={"count": 20})
    assert supervise(job, select("cpu:2")).exit_code == 0
    assert capfd.readouterr().out.split() != [str(number) for number in range(40)]


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("steps:nothing", 2, "the module steps has no function nothing"),
        pytest.param("nowhere.steps:report", 2, "there is no module nowhere.steps", marks=pytest.mark.slow),
        ("steps:give_object", 1, "not JSON serializable"),
    ],
)
def test_a_function_that_cannot_be_called_or_has_no_json_result_is_told(target, code, said):
    outcome = supervise(Job("function", target), select("cpu:1"))
    assert outcome.exit_code == code
    assert said in outcome.failure


def test_a_log_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="--log-dir"):
        supervise(Job("module", "this", log_dir=str(tmp_path / "file" / "logs")), select("cpu:1"))


@pytest.mark.parametrize(
    ("kind", "target"), [("script", "/nowhere.py"), ("script", "/"), ("module", "a b"), ("function", "package.module")]
)
def test_a_job_that_cannot_be_is_refused_before_anything_starts(kind, target):
    with pytest.raises(UsageError):
        Job(kind, target)


def test_a_job_travels_as_json():
    job = Job("module", "package.train", ("--epochs", "2"), {"a": [1]}, log_dir="logs", quiet=True, lines_to="stderr")
    assert Job.from_json(asdict(job)) == job
