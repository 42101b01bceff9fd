"""The error of `samestep estimate`: memory against an allocator, scaling against published tables.

    python benchmarks/estimate.py [--only memory|scaling] [--output benchmarks/results]

Memory: every case trains for real in a process of its own, and PyTorch's profiler records each block that the CPU
allocator allocates and frees; the peak of the last of four steps is compared with the estimate, which allocates
nothing. Scaling: an estimate is calibrated on one or two points of a published table, and predicts the others.

It writes estimate.json, and the tables of docs/estimate.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import facts
import torch
from torch import Tensor, nn
from torch.nn import functional

from samestep.estimate.costs import KINDS, Cluster, ParallelPlan, gather_seconds, needed_memory, read_cluster, step_time
from samestep.estimate.estimate import Request, make_search
from samestep.estimate.trace import checkpoint_blocks, trace
from samestep.estimate.workload import OPTIMIZERS, Workload, published, repeated_blocks
from samestep.recipes.estimating import recipe_workload

PAGE = Path(__file__).resolve().parents[1] / "docs" / "estimate.md"
MARKERS = ("<!-- measured: {} -->", "<!-- measured: end of {} -->")
STEPS = 4


@dataclass(frozen=True)
class Case:
    """One training whose memory is measured.

    Attributes:
        model: a recipe, or "encoder": an `nn.TransformerEncoder` of four layers.
        batch_size: samples of the global batch.
        num_microbatches: V.
        checkpointing: blocks are computed a second time.
    """

    model: str
    batch_size: int
    num_microbatches: int
    checkpointing: bool = False


CASES = (
    *(Case("lenet", size, 2) for size in (64, 256, 1024)),
    *(Case("mlp", size, 2) for size in (256, 4096)),
    *(Case("vgg", 64, 1), Case("vgg", 64, 4), Case("vgg", 128, 2)),
    *(Case("gpt", 32, 2), Case("gpt", 64, 8), Case("gpt", 32, 2, True), Case("gpt", 128, 2, True)),
    *(Case("encoder", 16, 2), Case("encoder", 64, 2), Case("encoder", 16, 2, True), Case("encoder", 64, 2, True)),
)

# Tokens a second and GPU of data parallelism, 8 H100 a node, by number of GPUs (The Ultra-Scale Playbook, 2025).
NANOTRON = {8: 40150, 16: 37610, 32: 35368, 64: 31112, 128: 26446, 256: 15700}
# Scaling efficiency on 512 Pascal GPUs, 4 a server, 25 Gbit/s RoCE (Sergeev and Del Balso 2018, figure 6).
HOROVOD = {"inception-v3": 0.90, "resnet-101": 0.90, "vgg-16": 0.68}
# Images a second of one P100 at batch 64 (TensorFlow benchmarks, 2017); ResNet-101 lies between 50 and 152 layers,
# 219 and 91.8, in time an image.
PASCAL_RATES = {"inception-v3": 142.0, "resnet-101": 2 / (1 / 219 + 1 / 91.8), "vgg-16": 154.0}
PARAMETERS = {"inception-v3": 27_161_264, "resnet-101": 44_549_160, "vgg-16": 138_357_544}
# Llama 3.1 8B, FSDP, tokens a second and GPU, local batch 2 of 8,192 tokens (torchtitan, docs/performance.md).
TORCHTITAN = {8: 5762, 128: 5605}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, predicts, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "scaling"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    parser.add_argument("--measure", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measured_peak(Case(**json.loads(options.measure)))))
        return 0
    path = options.output / "estimate.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results["facts"] = {**facts.machine(), "versions": facts.versions(("torch",))}
    if options.only != "scaling":
        results["memory"] = [compare(case) for case in CASES]
        write_table("memory", memory_rows(results["memory"]))
    if options.only != "memory":
        results["scaling"] = [*nanotron(), *horovod(), *torchtitan()]
        results["nanotron_by_second_point"] = nanotron_errors()
        lines = scaling_rows(results["scaling"], results["nanotron_by_second_point"])
        write_table("scaling", lines)
        print("\n".join(lines))
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


class Encoder(nn.Module):
    """Four layers of PyTorch's own encoder over `[N, 64, 128]`, and a head of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, 64, 128]` -> `[N, 10]`."""
        scores: Tensor = self.head(self.encoder(x).mean(1))
        return scores


def encoder_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy."""
    x, y = batch
    return functional.cross_entropy(model(x), y)


def workload_of(case: Case, folder: Path) -> Workload:
    """The model of a case."""
    if case.model == "encoder":

        def make_batch(count: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(count, 64, 128), torch.zeros(count, dtype=torch.int64)

        return Workload("encoder", Encoder, encoder_loss, make_batch)
    data = None
    if case.model == "mlp":
        data = str(folder / "table.csv")
        rows = torch.rand(200, 14, generator=torch.Generator().manual_seed(0)).tolist()
        lines = [",".join(f"x{i}" for i in range(14)), *(",".join(f"{value:.4f}" for value in row) for row in rows)]
        Path(data).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return recipe_workload(case.model, data)


def measured_peak(case: Case) -> int:
    """The peak of the CPU's allocator in the last of a few real steps, in bytes; this process is spent."""
    from torch.profiler import ProfilerActivity, profile, record_function

    import samestep

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        workload = workload_of(case, Path(folder))
    batch = workload.make_batch(case.batch_size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = workload.build()
        if case.checkpointing:
            checkpoint_blocks(case.model, repeated_blocks(model))
        run = samestep.Run(case.batch_size, case.num_microbatches, 0)
        optimizer = OPTIMIZERS[workload.optimizer](model.parameters(), lr=1e-4, **workload.settings)
        step = run.train_step(model, optimizer, workload.loss)
        for number in range(STEPS):
            with record_function(f"step {number}"):
                step(batch)
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == f"step {STEPS - 1}")
    total = peak = 0
    for start, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        total += size
        peak = max(peak, total if start >= begin else 0)
    return peak


def compare(case: Case) -> dict[str, Any]:
    """The estimate of a case, and the peak of the allocator."""
    with tempfile.TemporaryDirectory() as folder:
        workload = workload_of(case, Path(folder))
        layout = ParallelPlan(1, case.num_microbatches, case.batch_size, is_checkpointed=case.checkpointing)
        found = trace(workload, layout.microbatch_size, False, "32-true", case.checkpointing)
        memory = needed_memory(found, layout, KINDS["cpu"])
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", json.dumps(asdict(case))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    row = {**asdict(case), "estimate": memory.total, "measured": measured, "error": memory.total / measured - 1}
    print(memory_rows([row])[-1], flush=True)
    return row


def nanotron(second: int = 64) -> list[dict[str, Any]]:
    """Data parallelism by a ring between nodes of 8: what a step takes more grows with the messages, 2 (n - 1) alpha.

    One unknown, alpha in parts of a step; its bytes are hidden by the backward, or part of the first point.
    """
    first = min(NANOTRON)
    alpha = (NANOTRON[first] / NANOTRON[second] - 1) / _messages(second)
    return [
        _row(
            "nanotron",
            f"{count} GPUs",
            NANOTRON[first] / (1 + alpha * _messages(count)),
            tokens,
            count in (first, second),
        )
        for count, tokens in NANOTRON.items()
    ]


def _messages(count: int) -> int:
    return 2 * (count // min(NANOTRON) - 1)


def nanotron_errors() -> dict[str, float]:
    """The largest error of the predicted points, by the second point of the calibration."""
    return {
        str(second): max(abs(row["error"]) for row in nanotron(second) if not row["calibrated"])
        for second in NANOTRON
        if second != min(NANOTRON)
    }


def horovod() -> list[dict[str, Any]]:
    """128 servers of 4 P100: one unknown, the part of an all-reduce that is exposed, from ResNet-101."""
    cluster = Cluster(replace(KINDS["P100"], node_gbits=25, per_node=4), 512, 128)
    alone = {name: 64 / rate for name, rate in PASCAL_RATES.items()}
    reduce = {name: 2 * gather_seconds(cluster, 512, 4.0 * count) for name, count in PARAMETERS.items()}
    known = "resnet-101"
    exposed = alone[known] * (1 / HOROVOD[known] - 1) / reduce[known]
    return [
        _row("Horovod, 512 GPUs", name, alone[name] / (alone[name] + exposed * reduce[name]), efficiency, name == known)
        for name, efficiency in HOROVOD.items()
    ]


def torchtitan() -> list[dict[str, Any]]:
    """FSDP over 8 and 128 H100: the rate of computing from the first point, the links from the table of devices."""
    workload = published("llama-3.1-8b")
    search = make_search(workload, read_cluster("8xH100"), Request(16, "bf16-mixed"))
    layouts = {count: ParallelPlan(count, count, 2 * count, is_sharded=True, is_mixed=True) for count in TORCHTITAN}

    def rate(count: int, slowness: float) -> float:
        layout = layouts[count]
        microbatch = search.traces.at(layout.microbatch_size, False)
        seconds = step_time(microbatch, layout, search.cluster.resized(count), 16, slowness).step
        return 2 * workload.units / seconds

    first = min(TORCHTITAN)
    slowness = 1.0
    for _ in range(20):  # what is exposed depends a little on what computing takes
        slowness *= rate(first, slowness) / TORCHTITAN[first]
    return [
        _row("torchtitan, Llama 3.1 8B", f"{count} GPUs", rate(count, slowness), tokens, count == first)
        for count, tokens in TORCHTITAN.items()
    ]


def _row(table: str, point: str, predicted: float, published: float, calibrated: bool) -> dict[str, Any]:
    return {
        "table": table,
        "point": point,
        "predicted": predicted,
        "published": published,
        "error": predicted / published - 1,
        "calibrated": calibrated,
    }


def memory_rows(rows: list[dict[str, Any]]) -> list[str]:
    """The table of memory as Markdown."""
    lines = [
        "| model | batch | microbatches | checkpointing | estimate, MiB | measured, MiB | error |",
        "|---|" + "---:|" * 6,
    ]
    for row in rows:
        again = "yes" if row["checkpointing"] else "no"
        sizes = f"{row['estimate'] / 2**20:.2f} | {row['measured'] / 2**20:.2f} | {100 * row['error']:+.1f} %"
        lines.append(f"| {row['model']} | {row['batch_size']} | {row['num_microbatches']} | {again} | {sizes} |")
    return lines


def scaling_rows(rows: list[dict[str, Any]], errors: dict[str, float]) -> list[str]:
    """The table of scaling as Markdown."""
    lines = ["| table | point | estimate | published | error |", "|---|---|---:|---:|---:|"]
    for row in rows:
        error = "calibrated on it" if row["calibrated"] else f"{100 * row['error']:+.1f} %"
        lines.append(
            f"| {row['table']} | {row['point']} | {row['predicted']:,.4g} | {row['published']:,.4g} | {error} |"
        )
    found = ", ".join(f"{100 * error:.0f} % with {second}" for second, error in errors.items())
    return [*lines, "", f"The largest error of nanotron's predicted points depends on the second point: {found}."]


def write_table(name: str, lines: list[str]) -> None:
    """Puts a table between its markers in the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = (marker.format(name) for marker in MARKERS)
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text(before + "\n".join([begin, "", *lines, "", end]) + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
