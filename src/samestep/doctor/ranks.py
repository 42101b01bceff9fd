"""The ranks: what each one does in an examination, in workers that we started or under another launcher."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from samestep.comm.environment import Environment, read_environment
from samestep.comm.group import roll_call, store_host
from samestep.doctor.findings import Finding, good
from samestep.doctor.survey import Survey, Tell, Wrap, carry_out, start
from samestep.errors import PeerLostError
from samestep.train.process import own_device


def examine(report: str, timeout_seconds: float, quick: bool, wrap: Wrap = lambda transport: transport) -> None:
    """What a worker of ours does; rank 0 writes a line a finding to a file, so that nothing is lost if it is ended.

    Args:
        report: the file.
        timeout_seconds: how long to wait for other ranks.
        quick: whether to be content with having started.
        wrap: put around every transport; what a test breaks.

    Raises:
        LostRankError: a rank does not answer; rank 0 has written so.
    """
    os.dup2(2, 1)  # what libraries print must not get between the lines of --json
    path = Path(report)

    def tell(finding: Finding) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(finding)) + "\n")

    take_part(read_environment(), timeout_seconds, quick, tell, lambda: os._exit(1), wrap)


def take_part(
    place: Environment,
    timeout_seconds: float,
    quick: bool,
    tell: Tell,
    give_up: Callable[[], None],
    wrap: Wrap = lambda transport: transport,
    about_node: Sequence[Finding] = (),
) -> None:
    """Takes part in an examination, as one of several ranks.

    Args:
        place: ours.
        timeout_seconds: how long to wait for others.
        quick: whether to leave out the collectives.
        tell: takes the findings, on rank 0.
        give_up: ends this process.
        wrap: put around every transport.
        about_node: what the first rank of another node found out about its machine.

    Raises:
        LostRankError: a rank does not answer; rank 0 has told of it.
    """
    device = own_device(None, place)
    survey = Survey(place, device, timedelta(seconds=timeout_seconds), tell, give_up, wrap)
    if place.world_size == 1:
        tell(good("ranks", f"one, on {device}: there is nobody to talk to"))
        return
    store = start(survey)
    words = _tell_all(store, place, timeout_seconds, about_node)
    if place.rank == 0:
        tell(good("ranks", f"{place.world_size} started and met, on {device.type}"))
        for word in words[1:]:
            for row in json.loads(word):
                tell(Finding(**row))
    if not quick:
        carry_out(survey, dist.PrefixStore("survey", store))
    _leave(dist.PrefixStore("bye", store), place)


def _tell_all(
    store: dist.Store, place: Environment, timeout_seconds: float, about_node: Sequence[Finding]
) -> list[str]:
    """What every rank says of its machine, as JSON; what is good there need not be said."""
    host = socket.gethostname()
    rows = [
        {**asdict(finding), "name": f"{finding.name} on {host}"}
        for finding in about_node
        if finding.state != "good" and place.rank > 0
    ]
    ours = dist.PrefixStore("machines", store)
    missing = roll_call(ours, place.rank, place.world_size, timeout_seconds, store_host(place), json.dumps(rows))
    if missing:
        raise PeerLostError(f"rank {', '.join(map(str, missing))} met all others, and said no more", missing)
    return [ours.get(str(rank)).decode() for rank in range(place.world_size)]


def _leave(store: dist.Store, place: Environment) -> None:
    """Leaves; rank 0, which may host the store, as the last."""
    try:
        if place.rank > 0:
            store.set(str(place.rank), "bye")
        else:
            roll_call(store, 0, place.world_size, 5.0, None, "bye")
    except RuntimeError:
        return  # the store is gone, and with it whoever waited
