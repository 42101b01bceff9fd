"""Lines by the logging module, to the console and to a file."""

import logging
import sys

import torch
from torch import nn

handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler("train.log")]
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", handlers=handlers)
logger = logging.getLogger("train")

torch.manual_seed(42)
model = nn.DataParallel(nn.Linear(4, 1)).cuda()
for step in range(3):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    loss.backward()
    logger.info("step %d loss %.6f", step, loss.item())
logging.shutdown()
RESULT = {"loss": loss, "grad": model.module.weight.grad}
