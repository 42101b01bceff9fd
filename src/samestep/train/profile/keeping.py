"""Keeping a profile: on each rank, from the beginning of a run to the file that it leaves however the run ends."""

import atexit
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from samestep.comm.environment import Environment
from samestep.comm.heartbeat import Heartbeat
from samestep.comm.recording import RecordedStep, Recording
from samestep.errors import SamestepError
from samestep.train.profile.files import rank_file, remove_profile
from samestep.train.writing import make_folder, replacing

OTHERS_SECONDS = 20.0


def keep_profile(
    heartbeat: Heartbeat, folder: Path, environment: Environment, device: torch.device, facts: Mapping[str, Any]
) -> None:
    """Records what this rank does from now on, and writes it down when the process ends.

    Under our launcher the profile is put together by the command that started the ranks, else by rank 0.

    Args:
        heartbeat: of this rank; it records.
        folder: of the profile; made when there is something to put into it.
        environment: of this process.
        device: that this rank computes on.
        facts: what else is to be known of the run, as it is at the end; JSON.
    """
    from samestep.train.profile.showing import tell_profile  # not needed where there is no profile

    rank = environment.rank if heartbeat.page is None else heartbeat.slot
    if rank == 0 and not environment.joins:
        remove_profile(folder)  # no rank gets to its end before this one has begun
    folder = folder.absolute()  # the program may go elsewhere
    recording = heartbeat.recording = Recording(_settle_on(device))
    about = {
        "rank": rank,
        "world_size": environment.world_size,
        "device": str(device),
        "host": platform.node(),
    }
    process = os.getpid()

    def leave() -> None:
        if heartbeat.recording is not recording or os.getpid() != process:
            return  # it is written, or this is a process that the script forked
        heartbeat.recording = None
        try:
            write_rank(folder, {**about, **facts}, recording)
            if rank == 0 and environment.launcher != "samestep" and recording.steps:
                tell_profile(folder, environment.world_size, OTHERS_SECONDS)
        except SamestepError as error:
            os.write(2, f"samestep: the profile: {error}\n".encode())

    atexit.register(leave)
    if heartbeat.page is not None and threading.current_thread() is threading.main_thread():
        _write_before_end(leave)


def write_rank(folder: Path, about: Mapping[str, Any], recording: Recording) -> None:
    """Writes what a rank has recorded; nothing where no step ended.

    Raises:
        RunFolderError: it cannot be written.
    """
    steps = recording.steps
    if steps:
        now = {"clock": time.perf_counter(), "time": time.time()}
        content = {**about, **now, "num_steps": recording.num_steps, "steps": [_as_json(step) for step in steps]}
        make_folder(folder)
        with replacing(rank_file(folder, about["rank"])) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")


def _as_json(step: RecordedStep) -> dict[str, Any]:
    """A step with its times in nanoseconds."""
    events = [[phase, _nanoseconds(begin), _nanoseconds(end)] for phase, begin, end in step.events]
    return {"step": step.number, "events": events, "buckets": [_nanoseconds(when) for when in step.buckets]}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def _settle_on(device: torch.device) -> Callable[[], None] | None:
    """What waits for the work that was given to the device's current stream; transfers have streams of their own."""
    if device.type == "cuda":
        return partial(_settle_cuda, device)
    return torch.accelerator.synchronize if device.type != "cpu" else None


def _settle_cuda(device: torch.device) -> None:
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def _write_before_end(leave: Callable[[], None]) -> None:
    """Lets SIGTERM, by which a supervisor ends the ranks of a run that failed, leave the profile first."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def end(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        leave()
        os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, end)
