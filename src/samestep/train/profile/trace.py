"""The trace: a profile in Chrome's trace-event format, to be looked at in Perfetto or chrome://tracing.

Written as the "JSON Object Format" with complete events (`"ph": "X"`, times in microseconds), instant events and
metadata that names processes and threads, as the "Trace Event Format" document of the Chromium project describes them
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from samestep.train.profile.files import RankProfile, Step

COMPUTE, EXCHANGE = 1, 2
THREADS = {COMPUTE: "compute", EXCHANGE: "exchange"}


def make_trace(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """The trace of all ranks.

    A rank is a process. Its thread "compute" shows steps, and in them the phases of the main thread; its thread
    "exchange" shows how gradients travel: hidden beside the backward, then exposed, while the main thread waits.
    """
    origin = min(rank.steps[0].begin for rank in ranks)
    events = [event for rank in ranks for event in _of_rank(rank, origin)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_rank(rank: RankProfile, origin: int) -> Iterator[dict[str, Any]]:
    pid = rank.rank
    yield _metadata("process_name", pid, 0, {"name": f"rank {pid} ({rank.device})"})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    for tid, name in THREADS.items():
        yield _metadata("thread_name", pid, tid, {"name": name})
    for step in rank.steps:
        about = {"step": step.number}
        yield _complete("step", pid, COMPUTE, step.begin - origin, step.end - origin, about)
        for phase, begin, end in step.events:
            yield _complete(phase, pid, COMPUTE, begin - origin, end - origin, about)
        yield from _exchange(step, pid, origin)


def _exchange(step: Step, pid: int, origin: int) -> Iterator[dict[str, Any]]:
    """How the gradients of a step travelled."""
    about = {"step": step.number}
    for phase, begin, end in step.events:
        if phase == "exchange":
            yield _complete("exposed", pid, EXCHANGE, begin - origin, end - origin, about)
    if step.hidden is not None:
        begin, end = step.hidden
        yield _complete("hidden", pid, EXCHANGE, begin - origin, end - origin, about)
    for number, when in enumerate(step.buckets):
        args = {**about, "bucket": number}
        yield {"name": "bucket leaves", "ph": "i", "s": "t", **_place(pid, EXCHANGE, when - origin), "args": args}


def _complete(name: str, pid: int, tid: int, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "cat": "samestep",
        "ph": "X",
        **_place(pid, tid, begin),
        "dur": (end - begin) / 1e3,
        "args": args,
    }


def _place(pid: int, tid: int, when: int) -> dict[str, Any]:
    return {"pid": pid, "tid": tid, "ts": when / 1e3}


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}
