"""The wrapped forward: its chunks, the model's replicas and buffers, the exchange of results and gradients."""
