"""One training step, any devices, the same model.

    import samestep

    run = samestep.Run(global_batch_size=256, seed=0)
    step = run.train_step(model, optimizer, loss_fn)
    for batch in run.loader(dataset, shuffle=True):
        result = step(batch)

Names are imported when they are first used, so that `import samestep` is fast.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.version import __version__, refuse_older

if TYPE_CHECKING:
    from samestep import metrics, tutorial
    from samestep.checkpoint.digest import state_digest
    from samestep.comm.communicator import Communicator
    from samestep.data.batch import Batch
    from samestep.data.loader import Loader
    from samestep.data.nested import to_device, to_host, to_numpy
    from samestep.data.tensors import TensorData
    from samestep.devices.inventory import discover
    from samestep.devices.selection import select
    from samestep.engine.losses import Mean
    from samestep.engine.observer import StepObserver
    from samestep.engine.result import StepResult
    from samestep.engine.step import TrainStep
    from samestep.engine.strategy_options import Sharded
    from samestep.errors import SamestepError
    from samestep.launcher.supervisor import launch
    from samestep.logical.process_group import register_backend
    from samestep.run.hooks import EMA, Hook
    from samestep.run.run import Run
    from samestep.run.trainer import Trainer
    from samestep.runs.history import EpochRecord
    from samestep.scripts.data_parallel import DataParallel

refuse_older()

# cuBLAS gives the same bits from call to call only with this, and torch reads it once, at the first matrix product on a
# GPU: a script may compute one before it makes its run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# For models that a script compiles itself: by default inductor times some kernels, and takes the fastest.
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

_HOMES = {
    "Batch": "samestep.data.batch",
    "Communicator": "samestep.comm.communicator",
    "DataParallel": "samestep.scripts.data_parallel",
    "EMA": "samestep.run.hooks",
    "EpochRecord": "samestep.runs.history",
    "Hook": "samestep.run.hooks",
    "Loader": "samestep.data.loader",
    "Mean": "samestep.engine.losses",
    "Run": "samestep.run.run",
    "SamestepError": "samestep.errors",
    "Sharded": "samestep.engine.strategy_options",
    "StepObserver": "samestep.engine.observer",
    "StepResult": "samestep.engine.result",
    "TensorData": "samestep.data.tensors",
    "TrainStep": "samestep.engine.step",
    "Trainer": "samestep.run.trainer",
    "discover": "samestep.devices.inventory",
    "launch": "samestep.launcher.supervisor",
    "register_backend": "samestep.logical.process_group",
    "select": "samestep.devices.selection",
    "state_digest": "samestep.checkpoint.digest",
    "to_device": "samestep.data.nested",
    "to_host": "samestep.data.nested",
    "to_numpy": "samestep.data.nested",
}

__all__ = [
    "EMA",
    "Batch",
    "Communicator",
    "DataParallel",
    "EpochRecord",
    "Hook",
    "Loader",
    "Mean",
    "Run",
    "SamestepError",
    "Sharded",
    "StepObserver",
    "StepResult",
    "TensorData",
    "TrainStep",
    "Trainer",
    "__version__",
    "discover",
    "launch",
    "metrics",
    "register_backend",
    "select",
    "state_digest",
    "to_device",
    "to_host",
    "to_numpy",
    "tutorial",
]


def __getattr__(name: str) -> Any:
    """Imports a public name from its home (PEP 562)."""
    if name in ("metrics", "tutorial"):
        return import_module(f"samestep.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
