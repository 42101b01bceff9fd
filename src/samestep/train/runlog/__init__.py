"""The run log: the files that rank 0 writes during a run, from the ledger to the loss curve."""
