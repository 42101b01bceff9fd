"""Mixed precision: autocast around the forward, a GradScaler around the step."""

import torch
from torch import nn

torch.manual_seed(36)
model = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=2)
trace = []
for _ in range(4):
    optimizer.zero_grad()
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        out = model(torch.randn(10, 8).cuda())
        loss = nn.functional.cross_entropy(out, torch.randint(4, (10,)).cuda())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    trace.append([loss.item(), scaler.get_scale(), bool(norm.isfinite())])
print(out.dtype)
RESULT = {"trace": trace, "out": out, "state": model.state_dict()}
