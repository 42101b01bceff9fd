"""Samples are flipped and shifted by the global generators, in worker processes whose streams depend on the rank."""

import random

import tiny
import torch


def change(x):
    if random.random() < 0.5:
        x = x.flip(0)
    return x + 0.2 * torch.randn(())


if __name__ == "__main__":
    tiny.start()
    random.seed(0)
    model = tiny.parallel(tiny.classifier())
    tiny.train(model, tiny.loader(tiny.Augmented(change), num_workers=1), tiny.sgd(model))
