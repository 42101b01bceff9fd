"""Single normal numbers of NumPy, which draws them in pairs, between forwards; then of another generator of NumPy's."""

import numpy as np
import torch
from torch import nn

torch.manual_seed(7)
np.random.seed(7)
model = nn.DataParallel(nn.Linear(3, 2)).cuda()
lengths, outputs = [], []
for step in range(6):
    if step == 3:
        np.random.set_bit_generator(np.random.PCG64(5))
    lengths.append(np.random.normal(35, 5))
    outputs.append(model(torch.randn(8, 3).cuda()))
RESULT = {"lengths": lengths, "outputs": outputs}
