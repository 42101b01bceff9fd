"""Virtual devices: CUDA devices that are played by the CPU, so that a script written for GPUs runs anywhere."""
