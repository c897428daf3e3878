"""The random number generator SplitMix64, for functions that numba compiles.

The random numbers are the same on every machine and in every version of numba. The state of a generator is an
array of one uint64. All functions are compiled by numba and change the state in place.
"""

import numpy as np
from numba import njit

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


@njit(cache=True, nogil=True)
def _scramble(z):
    z = (z ^ (z >> _30)) * _A
    z = (z ^ (z >> _27)) * _B
    return z ^ (z >> _31)


@njit(cache=True, nogil=True)
def start(state, seed, index):
    """Set ``state`` to the start of a random stream. Every (``seed``, ``index``) has its own stream."""
    state[0] = _scramble(_scramble(np.uint64(seed) + _GAMMA) + np.uint64(index))


@njit(cache=True, nogil=True)
def below(state, n):
    """A random whole number in [0, n), for n up to 2³²."""
    state[0] += _GAMMA
    return np.int64(((_scramble(state[0]) >> _32) * np.uint64(n)) >> _32)


@njit(cache=True, nogil=True)
def shuffle(state, values):
    """Shuffle an array in place."""
    for i in range(len(values) - 1, 0, -1):
        j = below(state, i + 1)
        values[i], values[j] = values[j], values[i]
