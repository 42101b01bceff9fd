"""Functions that workers import by name."""

import os
from typing import Any

import torch


def describe(text: str, factor: int = 1) -> dict[str, Any]:
    print("printed by rank", os.environ["RANK"])
    return {"text": text * factor, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def give_tensor() -> torch.Tensor:
    return torch.arange(3)


def report(values: list[int]) -> dict[str, Any]:
    from samestep.comm.events import Channel

    channel = Channel.from_environment()
    assert channel is not None
    if os.environ["RANK"] == "0":
        channel.send("progress", epoch=1, epochs=1, step=1, steps=2, loss=0.5, samples_per_second=None)
        channel.send("line", text="epoch 1, [bold]loss 0.5[/bold]")
    return {"sum": sum(values), "nan": float("nan")}


def print_between_lines(count: int) -> None:
    from samestep.runs import run_log

    if "STEPS_DO_NOT_WAIT" in os.environ:
        run_log.SHOWN_SECONDS = 0.0
    display = run_log.TrainingDisplay(int(os.environ["RANK"]))
    for number in range(count):
        display.line(f"{2 * number}")
        if os.environ["RANK"] == "0":
            print(2 * number + 1)


def give_object() -> object:
    return object()


def fail_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError("this is rank " + str(rank))
    import time

    time.sleep(60)
