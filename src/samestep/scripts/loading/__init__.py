"""Loading: how the batches of a script's DataLoader are loaded once for all ranks."""
