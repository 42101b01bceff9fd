"""BatchNorm normalises by the statistics of each device's own samples."""

import tiny
from torch import nn

tiny.start()
model = tiny.parallel(tiny.classifier(nn.BatchNorm1d(16)))
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model))
