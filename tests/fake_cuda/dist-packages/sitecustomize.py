"""Gives this process FAKE_CUDA_DEVICES fake GPUs, under the names of real ones, when it imports torch."""

import os

if int(os.environ.get("FAKE_CUDA_DEVICES") or 0) > 0:
    import fake_cuda

    fake_cuda.install()
