"""What tests of sums add up."""

import torch


def make_leaves(count, numel, seed=0):
    """Leaves of very different magnitudes, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 7, (count, 1), generator=generator)
    return list((torch.randn(count, numel, generator=generator) * scale).unbind())
