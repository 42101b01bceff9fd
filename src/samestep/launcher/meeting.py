"""The meeting: where the machines of a run come together, how many, and how long they wait for each other."""

import errno
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from samestep.checks import check_number
from samestep.comm.environment import MAX_PORT
from samestep.comm.wire import listen
from samestep.errors import UsageError
from samestep.text import counted

DEFAULT_PORT = 29400  # torchrun's, of an endpoint
DEFAULT_MASTER_PORT = 29500  # torchrun's, of a machine with a number
TRUE, FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
MIN_SILENCE_SECONDS = 2.0  # four times the pause between two messages
SECONDS: Mapping[str, float] = {
    "join_timeout": 600.0,  # in which MIN machines must be there
    "last_call_timeout": 30.0,  # from then on, for those up to MAX
    "keep_alive_interval": 5.0,  # a machine is lost that was silent for so long,
    "keep_alive_max_attempt": 3.0,  # so many times
}
"""The names of --rdzv-conf, torchrun's, with their defaults."""


@dataclass(frozen=True)
class Meeting:
    """Where and how machines meet.

    Attributes:
        host, port: at one of the machines, which leads the run.
        number: this machine's; None if machines have no numbers.
        name: of the run; machines of another one are turned away.
        conf: the values of --rdzv-conf.
    """

    host: str
    port: int
    min_machines: int = 1
    max_machines: int = 1
    number: int | None = None
    name: str = ""
    conf: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Meeting":
        """The meeting by torchrun's options, by their names with underscores."""
        known = dict(options)
        least, most = parse_nodes(known.get("nnodes", "1"))
        number = known.get("node_rank")
        if number is not None and not (number.isdecimal() and int(number) < most):
            raise UsageError(f"got --node-rank {number}; needed: a number from 0 to {most - 1}, by --nnodes")
        if "rdzv_endpoint" in known:
            host, port = _parse_endpoint(known["rdzv_endpoint"])
        elif "master_addr" in known:
            host, port = known["master_addr"], int(known.get("master_port", DEFAULT_MASTER_PORT))
            check_number("--master-port", port, 1, MAX_PORT)
        else:
            nodes = known.get("nnodes", "1")
            raise UsageError(f"got --nnodes {nodes} and no place to meet; give --rdzv-endpoint HOST:PORT as well")
        conf = dict(part.strip().partition("=")[::2] for part in known.get("rdzv_conf", "").split(",") if part.strip())
        for name, value in conf.items():
            low = 0.1 if name.startswith("keep_alive") else 0.0
            is_known = value.lower() in (*TRUE, *FALSE) if name == "is_host" else _is_number(value, low)
            if name not in (*SECONDS, "timeout", "is_host") or not is_known:
                needed = f"is_host=true, or one of {', '.join(SECONDS)} and timeout with a number of seconds"
                raise UsageError(f"got --rdzv-conf {name}={value}; needed: {needed}")
        meeting = cls(host, port, least, most, None if number is None else int(number), known.get("rdzv_id", ""), conf)
        if meeting.silence_seconds < MIN_SILENCE_SECONDS:
            raise UsageError(
                f"got keep_alive_interval times keep_alive_max_attempt of {meeting.silence_seconds:g} s, after which a "
                f"silent machine is lost (--rdzv-conf); needed: {MIN_SILENCE_SECONDS:g} s or more"
            )
        is_first = number is None and "rdzv_endpoint" not in known and (most == 1 or meeting._is_here())
        return replace(meeting, number=0) if is_first else meeting  # torchrun's default, where all meet

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def machines(self) -> str:
        """How many are awaited, in words."""
        least, most = self.min_machines, self.max_machines
        return counted(most, "machine") if least == most else f"{least} to {most} machines"

    @property
    def waiting(self) -> str:
        """What a machine says while it waits for the others."""
        return f"waiting at {self.place} for {self.machines}, up to {self.seconds('join_timeout'):g} s"

    def seconds(self, name: str) -> float:
        """A value of `SECONDS`."""
        given = self.conf.get(name, self.conf.get("timeout") if name == "join_timeout" else None)
        return SECONDS[name] if given is None else float(given)

    @property
    def silence_seconds(self) -> float:
        """After so long without a word a machine is lost."""
        return self.seconds("keep_alive_interval") * self.seconds("keep_alive_max_attempt")

    def ranks_each(self, logical_devices: int) -> int:
        """The number of logical devices of each machine."""
        if self.min_machines < self.max_machines or logical_devices % self.max_machines:
            least = f"{self.min_machines}:" if self.min_machines < self.max_machines else ""
            raise UsageError(
                f"got --logical-devices {logical_devices} and --nnodes {least}{self.max_machines}; needed: one number "
                "of machines, each of which gets as many logical devices as the others"
            )
        return logical_devices // self.max_machines

    def open_door(self) -> socket.socket | None:
        """A socket that listens where all meet, if that is this machine and no other run of the command has done so."""
        is_told = "is_host" in self.conf or self.number is not None
        if not self._is_here():
            return None
        try:
            return listen(self.host, self.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not is_told:
                return None  # of another supervisor on this machine
            raise UsageError(
                f"cannot listen at {self.place}: {error.strerror}; give --rdzv-endpoint, or --master-addr and "
                "--master-port, with a name of this machine and a free port"
            ) from error

    def _is_here(self) -> bool:
        """Whether the others come to this machine."""
        if "is_host" in self.conf:
            return self.conf["is_host"].lower() in TRUE
        if self.number is not None:
            return self.number == 0
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
        except OSError:
            return False
        return True

    def absent(self, *, is_silent: bool = False) -> UsageError:
        """The error when the time is up."""
        came = "nothing answered at" if is_silent else f"not all of {self.machines} came to"
        return UsageError(
            f"{came} {self.place} in {self.seconds('join_timeout'):g} s; check that the command was started on every "
            "machine with the same --nnodes, --rdzv-id and place to meet, and that every machine reaches that name and "
            "port through firewalls, or wait longer by --rdzv-conf join_timeout=SECONDS"
        )

    def gone(self) -> str:
        """What a machine says that has lost the one where all meet."""
        return (
            f"the machine where all meet, {self.place}, has ended or cannot be reached, and the workers of this one "
            "are ended; start the run again on all machines, from its newest checkpoint"
        )


def parse_nodes(text: str) -> tuple[int, int]:
    """The smallest and the largest number of machines that "2" or "1:4" allows."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    low, high = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= low <= high:
        raise UsageError(f"got --nnodes {text}; needed: a number of 1 or more, such as 2, or two, such as 1:4")
    return low, high


def _parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of "node0:29400", "node0" or "[::1]:29400"."""
    found = re.fullmatch(r"\[?(?P<host>[^\[\]]+?)\]?(?::(?P<port>\d+))?", text.strip())
    if found is None or (":" in found["host"] and not text.strip().startswith("[")):
        raise UsageError(f"got --rdzv-endpoint {text}; needed: HOST:PORT, such as node0:29400")
    port = DEFAULT_PORT if found["port"] is None else int(found["port"])
    check_number("--rdzv-endpoint's port", port, 1, MAX_PORT, option="")
    return found["host"], port


def _is_number(text: str, least: float) -> bool:
    try:
        return least <= float(text) < float("inf")
    except ValueError:
        return False


def machine_name() -> str:
    """This machine's name, as others are told it."""
    return socket.gethostname() or f"process {os.getpid()}"
