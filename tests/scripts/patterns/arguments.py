"""Settings from the command line, and code that would divide its work if it found itself among several processes."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


def main():
    parser = argparse.ArgumentParser(description="a training")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--gpu", default="0,1,2,3", help="ids, with commas between them")
    parser.add_argument("--no-cuda", action="store_true")
    args = parser.parse_args()
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    print(ranks, int(os.environ.get("WORLD_SIZE", 1)))
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    print(args)
    torch.manual_seed(39)
    if args.cuda:
        torch.cuda.manual_seed(39)
    model = nn.DataParallel(nn.Linear(4, 1), device_ids=[int(i) for i in args.gpu.split(",")])
    if args.cuda:
        model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(args.steps):
        loss = model(torch.randn(10, 4).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss, "state": model.state_dict()}


if __name__ == "__main__":
    RESULT = main()
