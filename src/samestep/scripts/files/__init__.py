"""Files, commands and input of an adopted script: rank 0 writes, runs and asks once, for all ranks."""
