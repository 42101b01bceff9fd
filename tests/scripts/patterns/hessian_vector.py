"""The product of the Hessian with a vector, and the trace of the curvature along it."""

import torch
from torch import nn

torch.manual_seed(78)
model = nn.DataParallel(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))).cuda()
parameters = list(model.parameters())
loss = model(torch.randn(10, 3).cuda()).square().mean()
gradients = torch.autograd.grad(loss, parameters, create_graph=True)
vectors = [torch.randint_like(p, 2) * 2 - 1 for p in parameters]
products = torch.autograd.grad(gradients, parameters, grad_outputs=vectors, retain_graph=True)
sum((g * v).sum() for g, v in zip(gradients, vectors, strict=True)).backward()
RESULT = {"gradients": gradients, "products": products, "grads": [p.grad for p in parameters]}
