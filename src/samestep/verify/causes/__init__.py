"""The causes that make a program's numbers depend on the devices, each with its sign and its antidote."""
