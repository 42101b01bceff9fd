"""What hardware is there, which of it to use, and moving values to it."""
