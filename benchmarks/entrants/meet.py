"""The shortest program of ranks: imports torch and, as one of several processes, takes part in one all-reduce.

It imports nothing else, since `samestep run` imports beforehand what a script's imports make likely.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist

options = dict(zip(sys.argv, sys.argv[1:], strict=False))
if options["--processes"] != "1":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
line = socket.socket(socket.AF_UNIX)
line.connect(options["--gate"])
line.sendall(f"{os.getpid()} 0\n".encode("ascii"))
line.recv(1)  # until the benchmark ends
os._exit(0)
