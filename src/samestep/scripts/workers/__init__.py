"""What the workers of a single-process script have of it, and how it gets there.

Three nets keep a worker from computing with an old value: code goes by value (`pickling`, `image`), whatever it refers
to is looked at before each forward (`records`), and the driver computes some of the workers' chunks again, and compares
bits.
"""
