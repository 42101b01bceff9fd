"""Checkpoints: contract, digest, packing, files, saving and resuming."""
