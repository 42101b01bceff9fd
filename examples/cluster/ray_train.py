"""Ray Train starts the workers of a `samestep.Run`: one digest, on any number of them.

Start it by `python`, not by `samestep run`, because Ray starts the processes:

    python examples/cluster/ray_train.py 3       three workers
    python examples/cluster/ray_train.py 1 4     one to four, as many as there is room for
"""

import sys
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    """What each worker runs; rank 0 writes the digest."""
    import torch

    import samestep

    run = samestep.Run(global_batch_size=32)
    x = torch.randn(256, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    step = run.train_step(model, optimizer, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
    for batch in run.loader((x, x.square().sum(1, keepdim=True))):
        step(batch)
    digest = samestep.state_digest(model, optimizer)
    if run.is_main:
        Path(config["told"]).write_text(f"{run.world_size} workers, digest {digest}")


if __name__ == "__main__":
    numbers = tuple(map(int, sys.argv[1:])) or (2,)
    # Room for four workers on any machine, on this one's address, with little memory.
    ray.init(num_cpus=4, object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1", include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        TorchTrainer(
            train,
            train_loop_config={"told": str(told)},
            scaling_config=ScalingConfig(num_workers=numbers[0] if len(numbers) == 1 else numbers),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        print(told.read_text())
    ray.shutdown()
