"""The run log: what rank 0 writes of a run while it goes on, from the ledger to the loss curve."""
