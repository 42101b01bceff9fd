"""Checkpoints: the state of a run as safetensors and JSON, written whole or not at all and verified when read."""
