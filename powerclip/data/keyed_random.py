"""Random numbers as a function of a key: the same on every machine, worker and version of numpy or torch.

What a sample looks like in an epoch must not depend on who prepares it or on what was prepared before. So nothing here
has a state: a key (seed, epoch, sample, …) is mixed to 64 bits, and number i of that key is those bits mixed with i.
The mixer is splitmix64's (Steele, Lea & Flood 2014).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: successive numbers fall far apart
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Keys = npt.NDArray[np.uint64]


class Draw(IntEnum):
    """What a key of a sample is for, its last part: to draw more of one does not change another."""

    CAPTION = 0
    CROP = 1
    MASKS = 2
    BOXES = 3


def key_of(*parts: int) -> int:
    """64 bits for a tuple of whole numbers; every part and its place count."""
    key = len(parts)
    for part in parts:
        key = _mix((key ^ (part & _MASK)) + _STEP & _MASK)
    return key


def keys_of(*parts: int | npt.NDArray[np.integer]) -> Keys:
    """`key_of` of several tuples at once: parts that differ are arrays of one length."""
    keys = np.array([len(parts)], np.uint64)
    for part in parts:
        bits = np.array([part & _MASK], np.uint64) if isinstance(part, int) else part.astype(np.uint64)
        keys = _mix_array((keys ^ bits) + np.uint64(_STEP))
    return keys


def uniform(key: int, number: int) -> float:
    """Draw `number` of a key, in [0, 1)."""
    return (_mix(key + _STEP * (number + 1) & _MASK) >> 11) * 2.0**-53


def uniforms(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """Draws 0 … `count`-1 of each key, in [0, 1): [keys, count]. The same numbers as `uniform` gives."""
    return (_bits(keys, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """The numbers 0 … `count`-1 in random order."""
    # Sorting by 64 random bits; two that are equal (never seen) stay in order.
    return np.argsort(_bits(np.array([key], np.uint64), count)[0], kind="stable")


def _mix(bits: int) -> int:
    bits = (bits ^ bits >> 30) * _FIRST & _MASK
    bits = (bits ^ bits >> 27) * _SECOND & _MASK
    return bits ^ bits >> 31


def _bits(keys: Keys, count: int) -> Keys:
    """64 random bits for draws 0 … `count`-1 of each key."""
    return _mix_array(keys[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP))


def _mix_array(bits: Keys) -> Keys:
    """`_mix` over arrays; unsigned 64-bit arithmetic wraps as it should."""
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(_FIRST)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(_SECOND)
    return bits ^ bits >> np.uint64(31)
