"""Seeds: 64-bit numbers derived from others, the same on every machine and in every version."""

from operator import index

MASK = 0xFFFF_FFFF_FFFF_FFFF
GAMMA = 0x9E37_79B9_7F4A_7C15
MIX_1 = 0xBF58_476D_1CE4_E5B9
MIX_2 = 0x94D0_49BB_1331_11EB


def splitmix64(x: int) -> int:
    """The first output of a SplitMix64 generator in state x: a bijection of 0…2^64−1 that mixes every bit."""
    # Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants of
    # Stafford's variant 13 (as in Java's SplittableRandom and Vigna's splitmix64.c).
    z = (x + GAMMA) & MASK
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def derive_seed(*parts: int) -> int:
    """A 64-bit seed from any number of integers; each of them matters, as do their order and their number."""
    # Each round is a bijection, so seeds that differ in one part differ for certain; others collide with 2^-64.
    state = len(parts)
    for part in parts:
        state = splitmix64(state ^ (index(part) & MASK))
    return state


def microbatch_seed(seed: int, stream: int, step: int, microbatch: int) -> int:
    """The seed of the generators before the forward of a microbatch: no number of devices is part of it."""
    return derive_seed(seed, stream, step, microbatch)
