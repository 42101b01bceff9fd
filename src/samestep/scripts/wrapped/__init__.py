"""The wrapped forward: what enters and leaves it, its replicas and buffers, and what its chunks make together."""
