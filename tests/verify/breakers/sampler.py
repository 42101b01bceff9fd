"""The dataset has 13 samples: DistributedSampler repeats some where the devices do not divide it."""

import tiny

tiny.start()
model = tiny.parallel(tiny.classifier())
tiny.train(model, tiny.loader(tiny.dataset(13)), tiny.sgd(model))
