"""The hardware of a machine, and the selection of devices for a run."""
