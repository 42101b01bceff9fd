"""Forward-mode differentiation: tangents travel with the inputs."""

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

torch.manual_seed(129)
model = nn.DataParallel(nn.Linear(4, 2).requires_grad_(False)).cuda()
with forward_ad.dual_level():
    out = model(forward_ad.make_dual(torch.randn(8, 4).cuda(), torch.ones(8, 4).cuda()))
    print("not reached", forward_ad.unpack_dual(out).tangent)
