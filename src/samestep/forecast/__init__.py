"""Will it fit, and how fast will it be: the memory and the time of a step, worked out before anything is rented."""
