"""Ready models and data for `samestep train`."""
