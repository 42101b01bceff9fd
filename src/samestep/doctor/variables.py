"""The environment variables that change what torch, CUDA, NCCL and gloo do, each with its effect."""

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from samestep.comm.environment import LOOPBACK, chosen_nodes, chosen_transport
from samestep.doctor.findings import Finding, State, bad, good, note
from samestep.errors import UsageError

UNSET = "unset it"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Rule:
    """A variable that does something.

    Attributes:
        name: of the variable; one that ends in "*" stands for all that begin so.
        applies: whether a value of it does.
        effect: what.
        advice: what to do about it.
        state: how bad that is.
    """

    name: str
    applies: Callable[[str], bool]
    effect: str
    advice: str = UNSET
    state: State = "note"


def _is_set(value: str) -> bool:
    return value not in ("", "0")


RULES = (
    Rule("CUDA_LAUNCH_BLOCKING", _is_set, "every kernel is waited for: slow"),
    Rule(
        "CUBLAS_WORKSPACE_CONFIG",
        lambda value: value not in (":4096:8", ":16:8"),
        "cuBLAS may give other bits from call to call, and torch refuses to use it in deterministic mode",
        "set it to :4096:8, or unset it",
        "bad",
    ),
    Rule("NVIDIA_TF32_OVERRIDE", bool, "decides on TF32 over torch's head, and no contract of a run sees it"),
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _is_set, "float32 matrix products are computed in TF32"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_set, "every tensor is allocated anew: very slow"),
    Rule("PYTORCH_CUDA_ALLOC_CONF", bool, "changes how torch allocates GPU memory", "keep it if that is meant"),
    Rule("PYTORCH_ALLOC_CONF", bool, "changes how torch allocates memory", "keep it if that is meant"),
    Rule("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "every collective is checked: slow"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _is_set, "every NCCL operation makes the host wait: nothing overlaps"),
    Rule("NCCL_P2P_DISABLE", _is_set, "GPUs do not read each other's memory: slow"),
    Rule("NCCL_SHM_DISABLE", _is_set, "ranks of one host talk through the network: slow"),
    Rule("NCCL_IB_DISABLE", _is_set, "InfiniBand is not used: slow between nodes"),
    Rule("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "NCCL writes much to the output"),
    Rule("NCCL_ALGO", bool, "fixes NCCL's algorithm, and with it the bits of the native reduction", "keep it if meant"),
    Rule("NCCL_PROTO", bool, "fixes NCCL's protocol, and with it its speed", "keep it if meant"),
    Rule("LD_PRELOAD", bool, "loads a library into every process", "keep it if that is meant"),
    Rule("PYTHONHASHSEED", lambda value: value == "random", "sets have another order in every rank", "set it to 0"),
    Rule(
        "OMP_NUM_THREADS",
        lambda value: not value.isdecimal() or int(value) == 0,
        "is no number of threads",
        "unset it; samestep gives each worker its threads (--num-threads)",
    ),
)


def check_variables(environ: Mapping[str, str], interfaces: Collection[str]) -> list[Finding]:
    """What the variables that are set do.

    Args:
        environ: the environment variables.
        interfaces: the network interfaces of this host.
    """
    findings = [
        Finding(rule.name, rule.state, f"{environ[rule.name]!r}: {rule.effect}", rule.advice)
        for rule in RULES
        if rule.name in environ and rule.applies(environ[rule.name])
    ]
    for name in INTERFACES:
        findings += _check_interface(name, environ.get(name, ""), interfaces)
    findings += _check_proxies(environ)
    findings += _check_own(environ)
    return findings or [good("environment variables", "none is set that slows down or breaks")]


def _check_interface(name: str, value: str, interfaces: Collection[str]) -> list[Finding]:
    """A variable that names interfaces: NCCL's may be beginnings of names, "=lo" is a whole one, "^lo" all others."""
    if not value:
        return []
    there = f"there are {', '.join(sorted(interfaces))}"
    if name.startswith("GLOO"):
        wrong = [word for word in value.split(",") if word not in interfaces]
    elif value.startswith("^"):
        return []
    else:
        exact, words = value.startswith("="), value.removeprefix("=").split(",")
        wrong = [word for word in words if not any(i == word if exact else i.startswith(word) for i in interfaces)]
    return [bad(name, f"{value!r}: no interface {', '.join(wrong)}", f"name one that is: {there}")] if wrong else []


def _check_proxies(environ: Mapping[str, str]) -> list[Finding]:
    """A proxy that is asked for connections to this very host."""
    lowered = {name.lower(): value for name, value in environ.items()}
    used = [name for name in PROXIES if lowered.get(name)]
    free = {word.strip() for word in lowered.get("no_proxy", "").split(",")}
    if not used or free & {"*", LOOPBACK, "localhost", "127.0.0.0/8"}:
        return []
    effect = "programs ask the proxy even for this host: dashboards and data servers here are not reached"
    return [note(used[0], effect, f"NO_PROXY=localhost,{LOOPBACK}; ranks do not use it")]


def _check_own(environ: Mapping[str, str]) -> list[Finding]:
    """samestep's own variables."""
    findings = []
    for choose in (chosen_transport, chosen_nodes):
        try:
            choose(environ)
        except UsageError as error:
            findings.append(bad("samestep's variables", str(error), "correct it, or unset it"))
    if environ.get("SAMESTEP_TRANSPORT", "auto") in ("gloo", "shared"):
        value = environ["SAMESTEP_TRANSPORT"]
        findings.append(
            note("SAMESTEP_TRANSPORT", f"{value!r}: no other transport is used", "unset it to have a choice")
        )
    address = environ.get("MASTER_ADDR", "")
    if address and not _resolves(address):
        advice = "set it to the first node's address"
        findings.append(bad("MASTER_ADDR", f"{address!r} resolves to no address", advice))
    return findings


def _resolves(address: str) -> bool:
    """Whether a name or an address leads somewhere."""
    try:
        ip_address(address)
    except ValueError:
        try:
            socket.getaddrinfo(address, None)
        except OSError:
            return False
    return True


def own_interfaces() -> list[str]:
    """The network interfaces of this host."""
    return [name for _, name in socket.if_nameindex()]
