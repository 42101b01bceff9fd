"""Loading of the batches of a script's DataLoader, once for all ranks."""
