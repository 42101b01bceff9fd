"""A transformer's encoder, with a mask and without gradients in evaluation, where torch takes a shorter way."""

import torch
from torch import nn

torch.manual_seed(64)
layer = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
model = nn.DataParallel(nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(2):
    x = torch.randn(10, 4, 8).cuda()
    mask = torch.zeros(10, 4, dtype=torch.bool).cuda()
    mask[::3, -1] = True
    loss = model(x, src_key_padding_mask=mask).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    out = model(x)
RESULT = {"loss": loss, "out": out, "state": model.state_dict()}
