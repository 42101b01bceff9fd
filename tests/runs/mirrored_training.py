"""A training that tools mirror: `mirrored_training.py TOOLS STEP KIND`; rank 0 is lost, or raises, after it."""

import os
import signal
import socket
import sys

import torch

import samestep
from samestep.runs import mirrors

LOCAL = ("localhost", "127.0.0.1", "::1", socket.gethostname())


def note(event, args):
    """Notes each host that is asked for, or connected to, in a file."""
    host = args[0] if event == "socket.getaddrinfo" else args[1] if event == "socket.connect" else None
    host = host[0] if isinstance(host, tuple) else host if event == "socket.getaddrinfo" else None
    if host and host not in LOCAL:
        with open("hosts.txt", "a") as file:
            print(host, file=file)


sys.addaudithook(note)
tools, step, kind = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
makers = {
    "wandb": lambda: mirrors.WandbLogger("run", project="tests"),
    "mlflow": lambda: mirrors.MlflowLogger("run"),
    "trackio": lambda: mirrors.TrackioLogger("run", project="tests"),
}


if kind == "late":  # a run that was trained without
    for tool in tools:
        logger = makers[tool]()
        logger.log(0, {})
        logger.close()
    sys.exit()


class Fault(samestep.Hook):
    def on_step_end(self, trainer, result):
        if result.step == step and os.environ.get("LOCAL_RANK", "0") == "0":
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("went wrong")


run = samestep.Run(global_batch_size=8, num_microbatches=4, seed=0)
model = torch.nn.Linear(3, 1)
with samestep.Trainer(
    run,
    model,
    torch.optim.SGD(model.parameters(), lr=float(os.environ.get("LR", "0.01"))),
    lambda model, x: model(x).square().mean(),
    run_dir="run",
    loggers=[makers[tool]() for tool in tools if tool != "none"],
    checkpoint_steps=4,
    hooks=[Fault()],
) as trainer:
    trainer.fit(torch.randn(48, 3), epochs=3, resume="auto", allow_contract_change=True)
if run.is_main:
    print("digest", trainer.digest)
