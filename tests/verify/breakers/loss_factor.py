"""The loss is multiplied by the number of devices, as for a sum that is divided by the count of all devices."""

import tiny
from torch.nn import functional as F

_, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
loader = tiny.loader(tiny.dataset(), shuffle=False)
tiny.train(model, loader, tiny.sgd(model), lambda out, y: F.cross_entropy(out, y) * world_size)
