"""Scatter, replicate, parallel_apply and gather by hand, and subclasses with parts of their own."""

import torch
from torch import nn
from usual import Net, case, results, rows, train


@case
def replicated_by_hand():
    """A single tensor is no tuple."""

    def forward(module, x, device_ids, output_device):
        inputs = nn.parallel.scatter(x, device_ids)
        replicas = nn.parallel.replicate(module, device_ids[: len(inputs)])
        outputs = nn.parallel.parallel_apply(replicas, inputs)
        return nn.parallel.gather(outputs, output_device)

    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).cuda()
    for count in (10, 2, 10):
        x = torch.randn(count, 5).cuda().requires_grad_()
        y = forward(module, x, [0, 1, 2, 3], 0)
        y.square().mean().backward()
    with torch.no_grad():
        last = forward(module, x, [0, 1, 2], 1)
    print(y.device, last.device, last.requires_grad)
    return y, x.grad, last, [p.grad for p in module.parameters()]


@case
def scatter_overridden():
    """The first device gets fewer rows."""

    class Balanced(nn.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            sizes = [1, 3, 3, 3][: len(device_ids)]
            return [(part.cuda(k),) for k, part in enumerate(inputs[0].split(sizes))], [dict(kwargs) for _ in sizes]

    def forward(net, x, power=1):
        print("rows", len(x))
        return net.fc(x) ** power, {"total": net.fc(x).sum()}

    model, x = Balanced(Net(forward, fc=nn.Linear(3, 2))).cuda(), torch.randn(10, 3).cuda().requires_grad_()
    y, more = model(x, power=2)
    (y.mean() + more["total"].sum()).backward()
    return y, more["total"], x.grad, [p.grad for p in model.parameters()]


@case
def scattered_and_gathered():
    """A forward of its own, whose losses are computed in the chunks, and a gather of its own."""

    class Losses(nn.DataParallel):
        def forward(self, x, *, target=0.0):
            inputs, kwargs = self.scatter((x,), {"target": target}, self.device_ids)
            outputs = self.parallel_apply(self.replicate(self.module, self.device_ids[: len(inputs)]), inputs, kwargs)
            return self.gather(outputs, self.output_device)

        def gather(self, outputs, output_device):
            losses, longest = zip(*outputs, strict=True)
            mean = torch.stack([loss.to(output_device) for loss in losses]).mean()
            return mean, [rows.shape[0] for rows in longest]

    def forward(net, x, target):
        return (net.fc(x) - target).square().sum(), x[x.sum(1) > 0]  # as many rows as there are

    model = Losses(Net(forward, fc=nn.Linear(3, 1))).cuda()
    x = torch.randn(10, 3).cuda()
    _, lengths = model(x, target=x.sum(1, keepdim=True))
    return lengths, train(model, rows(10, 3), loss_of=lambda out: out[0])


RESULT = results()
