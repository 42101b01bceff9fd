"""All errors that samestep raises deliberately.

SamestepError                 exit code 1
├── UsageError (ValueError)   exit code 2: an invalid option or argument, detected before anything starts
│   └── DeviceError           a requested device that does not exist or cannot be used
├── DataError (ValueError)    an invalid file or dataset
├── LossError (ValueError)    a loss function that breaks the loss contract
├── BufferMergeError (ValueError)  a module buffer that differs between microbatches and has no rule for merging
├── NonFiniteError            a loss or gradient that is NaN or infinite
├── DeterminismError          an operation without a deterministic form, or ranks that ran different programs
├── AuditError                exit code 3: a device that computed wrong bits
├── PeerLostError             ranks that ended or did not respond in time
├── RunFolderError (OSError)  a run folder that cannot be written
├── CheckpointError (ValueError)  a checkpoint that is damaged, or of another model
├── ContractError (ValueError)  exit code 2: a run that would continue under another contract
├── OutOfMemoryError          a model, a microbatch or a cached dataset that does not fit in the device's memory
└── WorkerError               a worker process that failed

A message has the value that was got, the one that is needed and the option to change. Long quotations are shortened.
"""

from samestep.text import readable


class SamestepError(Exception):
    """Root of the tree: catches every error that samestep raises deliberately."""

    exit_code = 1

    def __str__(self) -> str:
        return readable(super().__str__())


class UsageError(SamestepError, ValueError):
    """An invalid argument; raised before a device is used or a process is started."""

    exit_code = 2


class DeviceError(UsageError):
    """A requested device does not exist, or cannot be used."""


class DataError(SamestepError, ValueError):
    """A file or dataset is invalid: missing, truncated, of the wrong type or range."""


class LossError(SamestepError, ValueError):
    """The loss function returned something other than a 0-d tensor, a 1-d tensor or a `Mean`."""


class BufferMergeError(SamestepError, ValueError):
    """A module buffer has different values on different microbatches, and no rule for merging them."""


class NonFiniteError(SamestepError):
    """A loss or gradient was NaN or infinite; the state is that before the step."""


class DeterminismError(SamestepError):
    """Equal bits cannot be guaranteed: an operation without a deterministic form, or ranks that differ."""


class PeerLostError(SamestepError):
    """Other ranks ended or did not respond in time; `ranks` are their numbers."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class AuditError(SamestepError):
    """A device computed or holds wrong bits; `is_left_out` on its own rank, if the others go on without it."""

    exit_code = 3

    def __init__(self, message: str, is_left_out: bool = False) -> None:
        super().__init__(message)
        self.is_left_out = is_left_out


class RunFolderError(SamestepError, OSError):
    """The run folder cannot be written: no space, no permission, or removed."""


class CheckpointError(SamestepError, ValueError):
    """A checkpoint is damaged or incomplete, or of another model."""


class ContractError(SamestepError, ValueError):
    """The run would continue under another contract; the message lists the fields that changed."""

    exit_code = 2


class OutOfMemoryError(SamestepError):
    """A model, microbatch or cached dataset does not fit in the device's memory; the message says what to change."""


class WorkerError(SamestepError):
    """A worker process failed; the message holds its rank, device, exit code or signal, and its traceback."""
