"""DistributedDataParallel as it should be: one, two, three devices agree up to rounding."""

import tiny

tiny.start()
model = tiny.parallel(tiny.classifier())
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model, momentum=0.9))
