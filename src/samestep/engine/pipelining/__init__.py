"""The `pipeline` strategy: the model cut into stages on different ranks, through which the microbatches go in turn."""
