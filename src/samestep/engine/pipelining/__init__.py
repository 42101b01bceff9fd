"""The `pipeline` strategy: the model is cut into stages on different ranks, which run the microbatches in turn."""
