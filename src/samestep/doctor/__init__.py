"""`samestep doctor`: checks of a machine, and of the collectives between its ranks."""
