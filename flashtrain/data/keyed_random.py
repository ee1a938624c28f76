"""Counter-based random numbers: a number depends on its keys alone, on every
machine and in any order.

Source: SplitMix64 of Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hashed(*keys: int | np.ndarray) -> np.ndarray:
    """Draw uniform uint64 numbers from one or more keys: integers of 0 or more, or arrays of
    them, which broadcast."""
    state = np.zeros(np.broadcast_shapes(*(np.shape(key) for key in keys)), dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        for key in keys:
            state = _mixed(state + _GOLDEN * (np.asarray(key).astype(np.uint64) + np.uint64(1)))
    return state


def uniform(*keys: int | np.ndarray) -> np.ndarray:
    """Draw uniform float64 numbers in [0, 1), multiples of 2^-53, from keys as `hashed` does."""
    return (hashed(*keys) >> np.uint64(11)) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
