"""The learning rate grows with the devices although the global batch does not."""

import tiny

_, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model, lr=0.05 * world_size))
