"""The step: randomness, accumulation, precision, buffers, clipping, the update."""
