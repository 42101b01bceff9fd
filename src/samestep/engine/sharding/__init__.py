"""The `sharded` strategy: parameters, gradients and optimizer state are sharded over the ranks, by PyTorch's FSDP2."""
