"""NCCL's errors that are no lost rank: the rank that has one raises it as what it is. Imports no torch."""

import re

from samestep.errors import DeviceError, OutOfMemoryError, SamestepError

# What NCCL's error codes mean: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclresult-t.
# A peer that ends is ncclRemoteError; but a rank that still connects to it may see a system error.
OF_A_PEER = re.compile(
    "ncclRemoteError|remote (peer|process)|Connection (refused|reset|closed)|Broken pipe|timed out|timeout|aborted",
    re.IGNORECASE,
)
OWN = re.compile(
    "ncclSystemError|unhandled system error|ncclInvalidUsage|invalid usage|ncclInvalidArgument|invalid argument|"
    "no socket interface|out of memory",
    re.IGNORECASE,
)
ADVICE = (
    (
        "/dev/shm|shared memory segment|No space left",
        "/dev/shm is too small for it: make it larger (docker run --shm-size=1g, or --ipc=host; samestep doctor shows "
        "its size), or set NCCL_SHM_DISABLE=1",
    ),
    (
        "socket interface|NCCL_SOCKET_IFNAME|Bootstrap",
        "it finds no network interface: set NCCL_SOCKET_IFNAME to this machine's (ip addr)",
    ),
    ("Duplicate GPU", "two ranks have the same GPU: start one rank a GPU"),
)
ELSE = "NCCL_DEBUG=INFO has it print its reasons, and samestep doctor checks this machine"


def nccl_failure(text: str, rank: int) -> SamestepError | None:
    """The error of a rank whose NCCL call failed with this text; None if the text is not NCCL's, or of a lost rank."""
    if "NCCL" not in text or OF_A_PEER.search(text) or not OWN.search(text):
        return None
    said = f"NCCL said: {' '.join(text.split())}"
    if "out of memory" in text.lower():
        return OutOfMemoryError(
            f"out of memory: NCCL finds none on the GPU of rank {rank} for its own buffers; end other programs on this "
            "GPU (nvidia-smi), use more and thus smaller microbatches (--num-microbatches), or let NCCL use less "
            f"(NCCL_BUFFSIZE=1048576, NCCL_MAX_NCHANNELS=8). {said}"
        )
    advice = next((advice for pattern, advice in ADVICE if re.search(pattern, text)), ELSE)
    return DeviceError(
        f"rank {rank} cannot exchange by NCCL: {advice}. SAMESTEP_TRANSPORT=gloo exchanges through host memory "
        f"instead, slowly. {said}"
    )
