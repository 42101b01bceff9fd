"""The loss is a sum over the device's samples, of which DistributedDataParallel takes the mean over the devices."""

import tiny
from torch.nn import functional as F

tiny.start()
model = tiny.parallel(tiny.classifier())
loader = tiny.loader(tiny.dataset(), shuffle=False)
tiny.train(model, loader, tiny.sgd(model, 0.01), lambda out, y: F.cross_entropy(out, y, reduction="sum"))
