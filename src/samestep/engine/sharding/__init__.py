"""The `sharded` strategy: parameters, gradients and optimizer state spread over the ranks, by PyTorch's FSDP2."""
