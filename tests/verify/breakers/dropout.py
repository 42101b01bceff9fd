"""Dropout masks come from each process's own stream."""

import tiny
from torch import nn

tiny.start()
model = tiny.parallel(tiny.classifier(nn.Dropout(0.25)))
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model))
