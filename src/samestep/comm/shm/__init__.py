"""The shared-memory transport among CPU ranks of one host."""
