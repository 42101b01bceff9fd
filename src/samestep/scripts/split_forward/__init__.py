"""A forward that is split: a single-process script runs once, in the driver, and workers compute chunks for it.

The driver is rank 0, and the first device. A forward (`shared_forward`): the arguments are cut (`chunks`), the driver
tells the workers what they need (`workers.link`, `workers.image`), all run their chunks (`calls`), and the driver joins
their results (`pieces`) and merges buffers (`replicas`). A backward: one autograd function (`derivatives`) tells the
gradients of the results, all differentiate their chunks, and sum along the tree.

Between these functions it holds that

    1. each message of the driver but the last has one answer of each worker, also where a chunk has failed;
    2. a process has a contiguous range of the chunks, the driver the first one: ranks are in the order of their chunks;
    3. every chunk finds the module as the first one did: parameters, buffers and attributes are put back after each;
    4. what a chunk draws depends on the forward's seed and the chunk's number, not on the process that runs it;
    5. a sum over chunks is the tree's sum over all chunks, whichever process has them.
"""
