"""Every error that samestep raises on purpose.

SamestepError                 exit code 1
├── UsageError (ValueError)   exit code 2: an option or argument that cannot be, known before anything starts
│   └── DeviceError           a device that was asked for and is not there
├── DataError (ValueError)    a file or a dataset that is not what it should be
├── LossError (ValueError)    a loss function that breaks the loss contract
├── BufferMergeError (ValueError)  a module buffer that differs between microbatches and has no rule for merging
├── NonFiniteError            a loss or gradient that is NaN or infinite
├── DeterminismError          an operation without a deterministic form, or ranks that ran different programs
├── PeerLostError             ranks that did not answer
├── RunFolderError (OSError)  a run folder that cannot be written
├── CheckpointError (ValueError)  a checkpoint that is damaged, or does not fit what it is loaded into
├── ContractError (ValueError)  exit code 2: a run that would go on under another contract
├── OutOfMemoryError          a microbatch or a cached dataset that does not fit in the device's memory
└── WorkerError               a worker process that failed

A message says what was got, what is needed and which option mends it. What it quotes is cut to a readable length.
"""

from samestep.text import readable


class SamestepError(Exception):
    """Root of the tree: catch this to catch all that samestep raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        return readable(super().__str__())


class UsageError(SamestepError, ValueError):
    """An argument that cannot be; raised before a device or a process is touched."""

    exit_code = 2


class DeviceError(UsageError):
    """A device was asked for that is not there, or cannot be used."""


class DataError(SamestepError, ValueError):
    """A file or dataset is not what it should be: missing, truncated, of the wrong type or range."""


class LossError(SamestepError, ValueError):
    """The loss function returned something other than a 0-d tensor, a 1-d tensor or a `Mean`."""


class BufferMergeError(SamestepError, ValueError):
    """A module buffer ended differently on different microbatches and no rule says how to merge it."""


class NonFiniteError(SamestepError):
    """A loss or gradient was NaN or infinite; the state is the one from before that step."""


class DeterminismError(SamestepError):
    """The promise of equal bits cannot be kept: an operation without a deterministic form, or ranks that differ."""


class PeerLostError(SamestepError):
    """Other ranks died or did not answer in time; `ranks` names them."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RunFolderError(SamestepError, OSError):
    """The run folder cannot be written: no space, no permission, or gone."""


class CheckpointError(SamestepError, ValueError):
    """A checkpoint is damaged or incomplete, or of another model than the one it is to be loaded into."""


class ContractError(SamestepError, ValueError):
    """The run would go on under another contract; the message lists the fields that changed."""

    exit_code = 2


class OutOfMemoryError(SamestepError):
    """A microbatch or a cached dataset does not fit in the device's memory; says how many microbatches do."""


class WorkerError(SamestepError):
    """A worker process failed; the message holds its rank, device, exit code or signal, and its traceback."""
