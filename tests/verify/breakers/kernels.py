"""Nothing but the number of samples a device computes at a time differs, and with it how kernels add."""

import tiny

tiny.start()
model = tiny.parallel(tiny.classifier())
tiny.train(model, tiny.loader(tiny.dataset(), shuffle=False), tiny.sgd(model))
