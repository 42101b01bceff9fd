"""The batch size is that of a device, so the global batch grows with the devices."""

import tiny

tiny.start()
model = tiny.parallel(tiny.classifier())
tiny.train(model, tiny.loader(tiny.dataset(), batch_size=12), tiny.sgd(model))
