"""The run: contract, training loop, evaluation, metrics, checkpoints and logs."""
