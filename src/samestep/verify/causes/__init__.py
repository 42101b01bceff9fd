"""The causes: what makes a program's numbers depend on the devices, how each shows itself, and what takes it away."""
