"""The run: contract, loop, evaluation, metrics, and what is written to disk."""
