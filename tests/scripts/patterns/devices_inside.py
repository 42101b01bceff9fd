"""Each chunk believes itself on a device of its own."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x):
        assert x.device == self.fc.weight.device == self.shift.device
        noise = torch.zeros(len(x), 2, device=x.device)
        print(x.device, noise.device, x.get_device(), torch.zeros_like(x).is_cuda)
        return self.fc(x) + noise + self.shift


torch.manual_seed(87)
model = nn.DataParallel(Net()).cuda()
model.register_full_backward_hook(lambda module, grad_in, grad_out: print("back", grad_out[0].device))
x = torch.randn(10, 4).cuda().requires_grad_()
out = model(x)
out.retain_grad()
out.square().sum().backward()
print(out.device, x.grad.device, model.module.fc.weight.grad.device)
RESULT = {"out": out.grad, "x": x.grad, "grad": model.module.fc.weight.grad}
