"""One training step, any devices, the same model."""

from samestep.version import __version__

__all__ = ["__version__"]
