"""Numbers that depend on a seed and a position alone, and a hash that never changes.

NumPy only.
"""

import numpy as np


def generator(seed: int, stream: int, chunk: int = 0) -> np.random.Generator:
    """Makes a generator for one stream of a seed's samples, at the beginning of a chunk of it.

    Bits come from Philox, a generator whose state is a counter (Salmon et al., Parallel random numbers: as easy as 1,
    2, 3, SC 2011): seed and stream are its key, the chunk the counter's highest word, so chunks are 2**192 samples
    apart.
    """
    key = np.array([seed % 2**64, stream], np.uint64)
    counter = np.array([0, 0, 0, chunk], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def mix(values: np.ndarray) -> np.ndarray:
    """Hashes uint64 of any shape, one to one: each bit of a result depends on all bits of its value.

    This is SplitMix64's step (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)  # arrays of uint64 wrap around, as is meant here
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
