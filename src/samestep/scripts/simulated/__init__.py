"""Simulated CUDA devices of single-process scripts, in host memory."""
