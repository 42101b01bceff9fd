"""Virtual devices: CUDA devices simulated on the CPU, so that a script written for GPUs runs anywhere."""
