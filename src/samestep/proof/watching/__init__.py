"""Watching: what a witness hooks into in a worker, one file for each thing that it watches."""
