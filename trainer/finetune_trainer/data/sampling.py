"""Random orders and samples that are pure functions of their arguments, and the same in later versions of NumPy."""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@lru_cache(maxsize=2)
def permutation(count: int, seed: int, stream: int) -> Indices:
    """Return a random order of the numbers below `count`; each stream of a seed has an order of its own.

    The numbers are sorted by the raw stream of Philox (Salmon et al. 2011).
    """
    # NumPy guarantees that this stream stays the same in later versions. It does not guarantee this for permutations.
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    generator = np.random.Philox(key=key)
    numbers = generator.random_raw(count)
    # Stable, so that equal numbers do not make the order depend on the sorting algorithm.
    return np.argsort(numbers, kind="stable").astype(np.int64)


def sample(size: int, count: int, seed: int, name: str) -> list[int]:
    """Return `size` of the numbers below `count`, drawn without replacement and sorted; at most all of them.

    A larger sample of the same seed and name contains the smaller sample.
    """
    # Not Python's hash of the name, which differs between processes.
    digest = hashlib.sha256(name.encode()).digest()
    stream = int.from_bytes(digest[:8])
    drawn = permutation(count, seed, stream)[:size]
    return sorted(drawn.tolist())
