"""A forward that is split: a single-process script runs once, in the driver, and workers compute chunks for it.

The driver is rank 0, and the first device. A forward (`shared_forward`): the arguments are cut (`chunks`), the driver
tells the workers what they need (`workers.link`, `workers.image`), all run their chunks (`calls`), and the driver joins
their results (`pieces`) and merges buffers (`replicas`). A backward: one autograd function (`derivatives`) tells the
gradients of the results, all differentiate their chunks, and sum along the tree.
"""
