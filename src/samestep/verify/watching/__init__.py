"""Watching: what a probe hooks into in a worker, one file for each thing that it watches."""
