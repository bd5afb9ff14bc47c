"""Which sets of regions a node wins, counted for each region in a thread's registers.

A thread owns one image and one caption. Sets lie as in `set_sums.py`: along LOW axes of length 2, those with the MIDDLE
regions beside each other in the bytes of a word, and `high`, the set of all further regions.

Axes: B images · M regions
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from powerclip.alignment.kernels.set_sums import sum_over_sets


@triton.jit
def sets_won(
    words,
    node,
    high,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    TILE_B: tl.constexpr,
    FUSED: tl.constexpr,
):
    """How many sets with each of 16 regions a node wins [B, 2, 2, 2, 2]; words [B, 2, …, 2] name sets' winners.

    Bytes are compared and added four at a time. Where a byte is the node's number, exclusive or leaves 0, and its
    difference from 128 alone has the highest bit, which PRMT spreads over the byte. So words of wins have bytes of 255:
    their sum is 255 times that of words with ones, and 255 has an inverse modulo 2^32.
    """
    # 128 in each byte, as a signed number.
    difference = -2139062144 - (words ^ (node * 0x01010101))
    if FUSED:
        wins = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0xba98;", "=r,r", [difference], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        ones = (difference >> 7) & 0x01010101
        wins = (ones << 8) - ones
    sums, one, two, three, four, five = _region_sums(wins, tl.zeros((TILE_B,), tl.int32), LOW)
    sums *= -0x01010101  # a byte for each set of middle regions
    counts = _counts_of_bytes(sums)
    of_middle = ((sums >> 8) & 255) + ((sums >> 24) & 255)
    of_last = ((sums >> 16) & 255) + ((sums >> 24) & 255)
    return _by_region(
        counts,
        _counts_of_bytes(one * -0x01010101),
        _counts_of_bytes(two * -0x01010101),
        _counts_of_bytes(three * -0x01010101),
        _counts_of_bytes(four * -0x01010101),
        _counts_of_bytes(five * -0x01010101),
        of_middle,
        of_last,
        high,
        M,
        LOW,
        MIDDLE,
        0,
        4,
    )


@triton.jit
def lengths_won(
    words,
    length,
    length_one,
    node,
    high,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """The sum of the inverse lengths of the sets with each region that a node wins [B, 2, 2, 2, 2]."""
    nothing = tl.zeros((TILE_B,), tl.float32)
    other = words ^ (node * 0x0101)
    both = tl.where((other & 0xFF) == 0, length, 0.0)
    of_middle = nothing
    if MIDDLE == 1:
        with_middle = tl.where((other & 0xFF00) == 0, length_one, 0.0)
        of_middle = sum_over_sets(with_middle, LOW)
        both += with_middle
    sums, one, two, three, four, five = _region_sums(both, nothing, LOW)
    return _by_region(sums, one, two, three, four, five, of_middle, nothing, high, M, LOW, MIDDLE, 0, 4)


@triton.jit
def _counts_of_bytes(words):
    """The sum of each word's four bytes, less than 256."""
    return ((words * 0x01010101) >> 24) & 255


@triton.jit
def _region_sums(values, nothing, LOW: tl.constexpr):
    """The sum [B] of values [B, 2, …, 2] over the sets of the first LOW regions, and over those with each of five."""
    one, two, three, four, five = nothing, nothing, nothing, nothing, nothing
    if LOW >= 5:
        without, joined = tl.split(values)
        five = sum_over_sets(joined, 4)
        values = without + joined
    if LOW >= 4:
        without, joined = tl.split(values)
        four = sum_over_sets(joined, 3)
        values = without + joined
    if LOW >= 3:
        without, joined = tl.split(values)
        three = sum_over_sets(joined, 2)
        values = without + joined
    if LOW >= 2:
        without, joined = tl.split(values)
        two = sum_over_sets(joined, 1)
        values = without + joined
    if LOW >= 1:
        without, one = tl.split(values)
        values = without + one
    return values, one, two, three, four, five


@triton.jit
def _by_region(
    sums,
    one,
    two,
    three,
    four,
    five,
    of_middle,
    of_last,
    high,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    REGION: tl.constexpr,
    AXES: tl.constexpr,
):
    """What belongs to each region, [B] each, side by side: 2^AXES regions from REGION on, zero beyond M."""
    if AXES > 0:
        lower = _by_region(
            sums, one, two, three, four, five, of_middle, of_last, high, M, LOW, MIDDLE, REGION, AXES - 1
        )
        upper: tl.constexpr = REGION + (1 << (AXES - 1))
        higher = _by_region(
            sums, one, two, three, four, five, of_middle, of_last, high, M, LOW, MIDDLE, upper, AXES - 1
        )
        values = tl.join(lower, higher)
    elif REGION >= M:
        values = tl.zeros_like(sums)
    elif REGION >= LOW + MIDDLE:
        values = tl.where((high >> (REGION - LOW - MIDDLE)) & 1 == 1, sums, tl.zeros_like(sums))
    elif REGION == LOW + 1:
        values = of_last
    elif REGION == LOW:
        values = of_middle
    else:
        values = (
            one
            if REGION == 0
            else (two if REGION == 1 else (three if REGION == 2 else (four if REGION == 3 else five)))
        )
    return values
