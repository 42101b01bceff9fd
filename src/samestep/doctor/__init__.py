"""The examination of a machine: what it has, whether it fits together, and whether its ranks can talk."""
