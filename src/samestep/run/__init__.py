"""`Run`, `Trainer` and what they are made of."""
