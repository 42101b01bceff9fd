"""Makes torch.distributed find NCCL built in: the names that it imports from its C++ half."""

from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from fake_cuda import cuda

TIMEOUT = timedelta(minutes=10)
VERSION = (2, 28, 9)


def complete(module: ModuleType) -> None:
    """Completes torch.distributed.distributed_c10d, which was imported without NCCL."""
    from torch.distributed import constants

    names: Any = torch._C
    major, minor, patch = VERSION
    names._nccl_version = lambda: major << 32 | minor << 16 | patch
    names._nccl_version_suffix = lambda: b""
    cuda.native.bind_nccl(cuda.native)
    group = cuda.native.ProcessGroupNCCL
    group.__module__ = "torch.distributed.distributed_c10d"
    names._distributed_c10d.ProcessGroupNCCL = group
    names._distributed_c10d._DEFAULT_PG_NCCL_TIMEOUT = TIMEOUT
    filled: Any = module
    filled.ProcessGroupNCCL, filled._NCCL_AVAILABLE = group, True
    filled.__all__ += ["ProcessGroupNCCL"]
    filled.default_pg_nccl_timeout = constants.default_pg_nccl_timeout = TIMEOUT
