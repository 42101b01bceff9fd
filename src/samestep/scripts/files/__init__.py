"""Files, commands and input of a single-process script: rank 0 writes, runs and asks once, for all ranks."""
