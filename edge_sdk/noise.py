"""Noise that hides what one device, or one example, adds to a sum.

All of it is drawn in whole steps of a grid on which the sum lies too: the low bits of a floating-point sum
would tell what the noise hides (Mironov, CCS 2012).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable

import numpy as np

from edge_sdk.tensors import Array

FINENESS = 22
"""Base-2 logarithm of the steps in a standard deviation: far finer than the noise, and so coarse that two
machines whose logarithms differ in the last bit draw the same whole numbers."""


def gaussian(seed: bytes, name: str, shape: tuple[int, ...]) -> Array:
    """Independent standard normal values, float64 of ``shape``: the same for the same seed and name.

    The bits are SHAKE-256 of both, not those of a statistical generator, whose other values can be worked
    out from a few that are known; the values are made of them by Box and Muller's transform. None is beyond
    8.6, where 1e-17 of the distribution lies.

    Args:
        seed: 32 bytes, a secret.
    """
    count = math.prod(shape)
    bits = np.frombuffer(hashlib.shake_256(seed + name.encode()).digest(16 * count), "<u8")
    uniform = (bits >> np.uint64(11)).astype(np.float64).reshape(2, count)
    radius = np.sqrt(-2.0 * np.log((uniform[0] + 1.0) * 2.0**-53))
    values: Array = radius * np.cos(uniform[1] * (2.0 * math.pi * 2.0**-53))
    return values.reshape(shape)


def deviation(multiplier: float, sensitivity: float, values: int) -> float:
    """Standard deviation, in steps, of the noise on a sum of whole steps.

    Args:
        multiplier: z, the deviation as a multiple of the sensitivity.
        sensitivity: the largest L2 norm, in steps, of what one device adds to the sum before it is rounded.
        values: of the sum; rounding moves each of them by less than a step.
    """
    return multiplier * (sensitivity * (1.0 + 2.0**-20) + math.sqrt(values))


def noised(values: Array, sensitivity: float, multiplier: float, *, seed: bytes, name: str) -> Array:
    """``values`` with Gaussian noise of ``multiplier`` times ``sensitivity``, float64, on a grid.

    Args:
        values: a sum, float64.
        sensitivity: the largest L2 norm of what one example adds to it; above 0, as is ``multiplier``.
    """
    step = 2.0 ** (math.floor(math.log2(multiplier * sensitivity)) - FINENESS)
    spread = deviation(multiplier, sensitivity / step, values.size)
    whole: Array = np.rint(values / step) + np.rint(spread * gaussian(seed, name, values.shape))
    return whole * step


def discrete_laplace(epsilon: float, *, randbits: Callable[[int], int] = secrets.randbits) -> int:
    """A whole number k with probability proportional to exp(−ε|k|): two-sided geometric noise.

    On a count that one example changes by one it gives ε-differential privacy (Ghosh et al., arXiv
    0811.2841), up to the 53 bits of a uniform draw. The default draws from the operating system.

    >>> from random import Random
    >>> [discrete_laplace(1.0, randbits=Random(seed).getrandbits) for seed in range(8)]
    [0, 0, 0, -2, 1, 0, -2, 0]
    """
    first, second = ((randbits(53) + 1) * 2.0**-53 for _ in range(2))
    return math.floor(-math.log(first) / epsilon) - math.floor(-math.log(second) / epsilon)
