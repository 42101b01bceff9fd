"""Hardware: what a machine has, and which of it a run uses."""
