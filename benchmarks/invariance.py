"""What does the number of processes change? Samples, gradients, parameters and scores of samestep and its peers.

    python benchmarks/invariance.py [--tools plain,samestep] [--parts images] [--processes 1,2,3] [--json FILE]

Each tool trains with one process and with more, from the same weights and seed, by the very script that the speed
benchmark times; `entrants/observed.py` notes the ids of the samples of each step and the parameters. Four parts:

- images: LeNet on 1,000 scanned digits, global batch 256, SGD 0.2, two epochs, shuffled.
- masked: one step of a small GPT on one batch, whose loss is a mean over the tokens that are not masked; 1 and 2.
- batchnorm: one step of a CNN with BatchNorm on one batch; 1, 2 and 4 processes.
- scored: how many samples count when a test set of 1,003 is evaluated.

In "masked" and "batchnorm" the data is one global batch, so each step has the same samples, whatever the order. Every
process has one thread. A tool that is not installed is left out, and said to be. Nothing here is timed.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import facts
import torch
from contest import Contestant, EntrantError, end_all, scratch
from page import invariance_rows
from roster import BY_NAME, DEFAULT, PACKAGES
from torch import Tensor
from workloads import SEED, WORKLOADS

TOOLS = ("plain", "accelerate", "lightning", "fabric", DEFAULT)
PARTS = ("images", "masked", "batchnorm", "scored")
MORE_PROCESSES = {"masked": (1, 2), "batchnorm": (1, 2, 4)}
NUM_IMAGES, NUM_SCORED = 1_000, 1_003
STEPS_AN_EPOCH, NUM_EPOCHS = 4, 2
IGNORED = -100
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Observation:
    """What some processes did together.

    Attributes:
        ids: of the samples of each step, sorted.
        update: by how much all steps together moved each parameter, float64.
        after: the parameters at the end.
        digest: of the state at the end.
    """

    ids: list[list[int]]
    update: Tensor
    after: Tensor
    digest: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Observes all tools, prints the tables and writes the JSON; returns 1 where a tool failed or our bits differ."""
    options = read_options(arguments)
    found: dict[str, Any] = {"facts": {**facts.machine(), "versions": facts.versions(PACKAGES)}}
    found |= {part: [] for part in options.parts} | {"failed": []}
    tools = [name for name in options.tools if BY_NAME[name].is_installed]
    for name in options.tools:
        if name not in tools:
            print(f"left out: {name}: {BY_NAME[name].package} is not installed")
    with scratch() as folder, ThreadPoolExecutor(options.at_once) as pool:
        jobs = [(part, name, pool.submit(work)) for part, name, work in plan(options, tools, folder)]
        for part, name, job in jobs:
            try:
                found[part] += job.result()
                print(f"{part}: {name} is done", file=sys.stderr, flush=True)
            except EntrantError as error:
                found["failed"].append({"part": part, "tool": name, "reason": str(error)})
                print(f"failed: {error}", file=sys.stderr)
    for part in options.parts:
        print(f"\n{invariance_rows(part, found[part])}", end="", flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ours = [row for part in options.parts for row in found[part] if row["tool"] == DEFAULT]
    return int(bool(found["failed"]) or not all(row.get("same_bits", True) for row in ours))


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS), metavar="NAMES", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAMES", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--processes", default="1,2,3", metavar="COUNTS", help="of images and scored; the first is 1")
    parser.add_argument("--at-once", type=int, default=2, help="how many tools are under way at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there too")
    options = parser.parse_args(arguments)
    for name, known in (("tools", TOOLS), ("parts", PARTS)):
        setattr(options, name, getattr(options, name).split(","))
        if unknown := [value for value in getattr(options, name) if value not in known]:
            parser.error(f"got {', '.join(unknown)}; there are {', '.join(known)}")
    options.processes = [int(count) for count in options.processes.split(",")]
    if options.processes[0] != 1 or options.at_once < 1:
        parser.error("--processes begins with 1, to which the others are compared; --at-once is at least 1")
    return options


def plan(
    options: argparse.Namespace, tools: Sequence[str], folder: Path
) -> list[tuple[str, str, Callable[[], list[dict[str, Any]]]]]:
    """What is to be done: the part, the tool, and the function that gives its rows."""
    jobs: list[tuple[str, str, Callable[[], list[dict[str, Any]]]]] = []
    makers = {"images": images, "masked": masked, "batchnorm": one_batch, "scored": test_set}
    for part in options.parts:
        data = folder / f"{part}.pt"
        torch.save(makers[part](), data)
        for tool in tools:
            if part == "scored":
                work = partial(score_all, tool, options.processes[1:], data, folder)
            elif part == "batchnorm" and tool not in ("plain", DEFAULT):
                continue  # the others wrap the same DistributedDataParallel
            else:
                work = partial(observe_all, part, tool, MORE_PROCESSES.get(part, options.processes), data, folder)
            jobs.append((part, tool, work))
    return jobs


def images() -> Data:
    """Scanned digits, with label and id as targets."""
    inputs, labels = _digits(NUM_IMAGES)
    return inputs, torch.stack([labels, torch.arange(len(labels))], dim=1)


def masked() -> Data:
    """One global batch of windows, of which between one and all tokens count; the id is the targets' last column."""
    tokens, labels = WORKLOADS["W3"].data(steps=1)
    lengths = torch.randint(1, labels.shape[1] + 1, (len(labels), 1), generator=torch.Generator().manual_seed(SEED))
    labels[torch.arange(labels.shape[1]) >= lengths] = IGNORED
    return tokens, torch.cat([labels, torch.arange(len(labels))[:, None]], dim=1)


def one_batch() -> Data:
    """One global batch of colour images, with label and id as targets."""
    inputs, labels = WORKLOADS["W4"].data(steps=1)
    return inputs, torch.stack([labels, torch.arange(len(labels))], dim=1)


def test_set() -> Data:
    """Scanned digits to be scored."""
    return _digits(NUM_SCORED)


def observe_all(part: str, tool: str, counts: Sequence[int], data: Path, folder: Path) -> list[dict[str, Any]]:
    """A row for each number of processes, compared with one process."""
    seen = {count: observe(part, tool, count, data, folder) for count in counts}
    return [{"tool": tool, "processes": count, **compare(seen[1], seen[count])} for count in counts]


def observe(part: str, tool: str, num_processes: int, data: Path, folder: Path) -> Observation:
    """Trains once, and reads what all processes noted.

    Raises:
        EntrantError: the tool failed, or its processes ended with different parameters.
    """
    entrant = replace(BY_NAME[tool], script="observed")
    num_steps = STEPS_AN_EPOCH * NUM_EPOCHS if part == "images" else 1
    arguments = [f"{BY_NAME[tool].script}:{part}", "--data", str(data), "--warm-up", str(num_steps)]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        name = run_once(Contestant(entrant, num_processes, Path(own), arguments))
        records = [torch.load(path, weights_only=True) for path in Path(own).glob("record-*.pt")]
    first = records[0]
    if len(records) != num_processes or any(not torch.equal(record["after"], first["after"]) for record in records):
        raise EntrantError(f"{name}: {len(records)} records, which do not all end with the same parameters")
    ids = [sorted(i for record in records for i in record["ids"][step]) for step in range(num_steps)]
    return Observation(ids, first["after"].double() - first["before"].double(), first["after"], first["digest"])


def score_all(tool: str, counts: Sequence[int], data: Path, folder: Path) -> list[dict[str, Any]]:
    """A row for each number of processes: how many samples they scored together."""
    entrant = replace(BY_NAME[tool], script="evaluation", options=("--tool", tool))
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            run_once(Contestant(entrant, count, Path(own), ["W1", "--data", str(data)]))
            scored = sum(json.loads(path.read_text()) for path in Path(own).glob("record-*.json"))
        rows.append({"tool": tool, "processes": count, "samples": NUM_SCORED, "scored": scored})
    return rows


def run_once(contestant: Contestant) -> str:
    """Waits until all processes are at their gates, which is when they have left their records, and ends them."""
    try:
        contestant.wait_until_ready()
    finally:
        end_all([contestant])
    return contestant.name


def compare(alone: Observation, together: Observation) -> dict[str, Any]:
    """How a run of some processes differs from that of one process.

    Returns:
        `samples` and `twice`: of an epoch, the greatest over the epochs; `same_samples`: how many steps had the samples
        that one process has in them, of `steps`; `parameters`: the greatest difference at the end; `update`: the
        difference of the whole update (of one step with SGD: of the gradient), relative, in the Euclidean norm;
        `same_bits`: whether the digests of the states are equal; `digest`.
    """
    starts = range(0, len(together.ids), STEPS_AN_EPOCH)
    epochs = [[i for ids in together.ids[start : start + STEPS_AN_EPOCH] for i in ids] for start in starts]
    return {
        "samples": max(len(epoch) for epoch in epochs),
        "twice": max(len(epoch) - len(set(epoch)) for epoch in epochs),
        "steps": len(together.ids),
        "same_samples": sum(one == other for one, other in zip(alone.ids, together.ids, strict=True)),
        "parameters": float((together.after - alone.after).abs().max()),
        "update": float((together.update - alone.update).norm() / alone.update.norm()),
        "same_bits": together.digest == alone.digest,
        "digest": together.digest,
    }


def _digits(count: int) -> Data:
    """So many scanned digits, in [0, 1]."""
    from samestep.data.named import digits

    inputs, labels = digits()
    return inputs[:count].float() / 255, labels[:count]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # everything is cleaned up, as after Ctrl-C
    sys.exit(main())
