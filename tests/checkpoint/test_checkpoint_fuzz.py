"""Checkpoints with right checksums and any content: loaded as what they say, or refused; no crash, no hang."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from checkpoint_fuzz import make_bases

PROGRAM = Path(__file__).with_name("checkpoint_fuzz.py")
SEED, BATCH = 0, 500


def outcomes(folder, first, stop):
    """(number, outcome) of each case; a process that a case ends is followed by another, which begins behind it."""
    while first < stop:
        command = [sys.executable, str(PROGRAM), str(folder), str(SEED), str(first), str(min(BATCH, stop - first))]
        child = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        lines = [line.split(maxsplit=1) for line in child.stdout.splitlines()]
        yield from ((int(number), outcome) for number, outcome in lines)
        first += len(lines)
        if child.returncode:
            yield first, f"deviation: exit code {child.returncode}"
            first += 1
        if child.stderr:
            print(child.stderr[-4000:])


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_checkpoint_of_any_content_is_loaded_as_it_is_or_refused(tmp_path, count, capsys):
    make_bases(tmp_path / "bases")
    found = list(outcomes(tmp_path, 0, count))
    counts = Counter(outcome for _, outcome in found)
    with capsys.disabled():
        print(f"\n{count} mutated checkpoints, seed {SEED}: {dict(sorted(counts.items()))}")
    assert [number for number, _ in found] == list(range(count))
    assert [case for case in found if case[1] not in ("refused", "same", "other")] == []
    assert min(counts[outcome] for outcome in ("refused", "same", "other")) > 0
