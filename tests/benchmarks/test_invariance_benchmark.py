import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import invariance
import page
from invariance import Observation


def observed(ids, after, digest):
    after = torch.tensor(after)
    return Observation(ids, after.double(), after, digest)


def test_two_processes_change_the_samples_and_parameters_of_ddp_and_no_bit_of_samestep(tmp_path, capsys):
    file = tmp_path / "invariance.json"
    told = ["--tools", "plain,samestep", "--parts", "images", "--processes", "1,2", "--json", str(file)]
    assert invariance.main(told) == 0
    found = json.loads(file.read_text())
    assert found["failed"] == []
    ddp, ours = ([row for row in found["images"] if row["tool"] == name] for name in ("plain", "samestep"))
    assert [row["processes"] for row in ddp] == [row["processes"] for row in ours] == [1, 2]
    assert all(row["samples"] == 1_000 and row["twice"] == 0 and row["steps"] == 8 for row in ddp + ours)
    assert ddp[1]["same_samples"] == 0
    assert ddp[1]["parameters"] > 1e-4, "far more than rounding"
    assert ours[1]["same_samples"] == 8
    assert ours[1]["parameters"] == 0
    assert ours[0]["digest"] == ours[1]["digest"] != ddp[1]["digest"]
    printed = capsys.readouterr().out
    assert "the same samples in every step; the same bits" in printed
    (tmp_path / "docs").mkdir()
    page.main(["--results", str(tmp_path), "--docs", str(tmp_path / "docs")])
    assert page.invariance_rows("images", found["images"]) in (tmp_path / "docs" / "benchmarks.md").read_text()


def test_samples_taken_twice_other_samples_and_other_parameters_are_told():
    alone = observed([[0, 1], [2, 3], [4], [5]] * 2, [1.0, 2.0], "a")
    padded = observed([[0, 1], [2, 4], [3], [5, 5]] * 2, [1.0, 2.5], "b")
    row = invariance.compare(alone, padded)
    assert (row["samples"], row["twice"], row["same_samples"], row["steps"]) == (7, 1, 2, 8)
    assert (row["parameters"], row["same_bits"]) == (0.5, False)
    assert row["update"] == pytest.approx(0.5 / 5**0.5)
    row |= {"tool": "plain", "processes": 2}
    expected = "7 samples an epoch, 1 of them twice; the same samples in 2 of 8 steps; parameters differ by up to 0.5"
    assert expected in page.invariance_rows("images", [row])
    assert "differs by 22 %" in page.invariance_rows("masked", [row])


def test_bits_of_ours_that_differ_are_a_failure(monkeypatch):
    row = {"tool": "samestep", "processes": 2, "same_bits": False, "update": 0.1}
    monkeypatch.setattr(invariance, "observe_all", lambda *_: [row])
    assert invariance.main(["--tools", "samestep", "--parts", "masked"]) == 1


def test_what_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit):
        invariance.main(["--parts", "speed"])
    assert "got speed; there are images, masked, batchnorm, scored" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        invariance.main(["--processes", "2,3"])
    assert "--processes begins with 1" in capsys.readouterr().err
