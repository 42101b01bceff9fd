"""Tensor parallelism: every rank has a part of each matrix, and the ranks execute each microbatch together."""
