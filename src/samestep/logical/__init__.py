"""Logical devices: a multi-process script runs as V ranks on the devices that there are."""
