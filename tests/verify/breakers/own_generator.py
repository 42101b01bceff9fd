"""The dataset has a generator of its own, from which each device draws for its samples only."""

import numpy as np
import tiny

tiny.start()
generator = np.random.default_rng(3)
data = tiny.Augmented(lambda x: x * float(generator.uniform(0.5, 1.5)))
model = tiny.parallel(tiny.classifier())
tiny.train(model, tiny.loader(data), tiny.sgd(model))
