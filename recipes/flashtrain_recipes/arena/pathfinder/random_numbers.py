"""Random numbers in compiled code: SplitMix64 (Steele, Lea, Flood 2014), with a stream
for each (key, number)."""

from __future__ import annotations

import numpy as np
from numba import njit

GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@njit(cache=True, inline="always")
def mixed(value):
    """Return SplitMix64's output for a 64-bit value: a bijection whose results look random."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@njit(cache=True, inline="always")
def begun(key, number):
    """Return the initial state, (1,) uint64, of the random stream that belongs
    to `key` and `number`."""
    state = np.zeros(1, dtype=np.uint64)
    state[0] = mixed(key ^ mixed(np.uint64(number) + GAMMA))
    return state


@njit(cache=True, inline="always")
def uniform(state):
    """Return a random float64 in [0, 1), and advance the state (1,) uint64."""
    state[0] += GAMMA
    return (mixed(state[0]) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, inline="always")
def below(state, count):
    """Return a random whole number in [0, count), and advance the state (1,) uint64."""
    return int(uniform(state) * count)
