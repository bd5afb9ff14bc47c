"""Sums over sets of regions in a thread's registers, as the exact kernels enumerate them.

A thread owns one image. The sums of a node over the sets of LOW regions come from doubling, (s) → (s, s + q_m), and lie
along LOW axes of length 2. Each stands for several sets: joined with those of the next MIDDLE regions, whose
similarities are added where they are needed, and with `high`, the set of all further regions.

A set's number has a bit for each region. Its lowest LOW bits are the place along the axes.

Axes: B images · M regions
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def set_sums(
    q,
    stride,
    valid,
    unit,
    high,
    start,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Similarities [B, 2, …, 2] of one node with the sets of the first LOW regions, each joined with the set `high`.

    Whole numbers, `unit` for a similarity of 1, whose last SHIFT bits are 0; float32 where SHIFT is −1. `start` [B] is
    added to all.
    """
    sums = start
    for region in tl.static_range(LOW + MIDDLE, M):
        value = _value(q + region * stride, valid, unit, SHIFT)
        sums += tl.where((high >> (region - LOW - MIDDLE)) & 1 == 1, value, 0)
    for region in tl.static_range(LOW):
        value = _value(q + region * stride, valid, unit, SHIFT)
        for _ in tl.static_range(region):
            value = tl.expand_dims(value, 1)
        # A new axis for each region, never flattened: its two halves lie in one thread's registers and stay there.
        sums = tl.join(sums, sums + value)
    return sums


@triton.jit
def middle_sums(
    q, stride, valid, unit, LOW: tl.constexpr, MIDDLE: tl.constexpr, SHIFT: tl.constexpr, TILE_B: tl.constexpr
):
    """Similarities of one node with the one or two regions after the first LOW, as [B, 1, …, 1]; zero where none is."""
    one = tl.zeros((TILE_B,), tl.int32 if SHIFT >= 0 else tl.float32)
    two = tl.zeros((TILE_B,), tl.int32 if SHIFT >= 0 else tl.float32)
    if MIDDLE >= 1:
        one = _value(q + LOW * stride, valid, unit, SHIFT)
    if MIDDLE == 2:
        two = _value(q + (LOW + 1) * stride, valid, unit, SHIFT)
    return beside_sets(one, LOW), beside_sets(two, LOW)


@triton.jit
def set_numbers(high, LOW: tl.constexpr, MIDDLE: tl.constexpr, TILE_B: tl.constexpr):
    """The numbers [B, 2, …, 2] of the sets that `set_sums` sums over."""
    number = tl.zeros((TILE_B,), tl.int32) + (high << (LOW + MIDDLE))
    for region in tl.static_range(LOW):
        number = tl.join(number, number + (1 << region))
    return number


@triton.jit
def load_sets(at, stride, valid, LOW: tl.constexpr):
    """What a table of sets × images holds for the sets of the first LOW regions, as `set_sums` lays them out.

    `at` [B] points to the empty one of them, and sets are `stride` apart. Each number is read as a vector of images and
    joined with the next: a tensor of all pointers would go to other threads, and through shared memory.
    """
    if LOW == 0:
        values = tl.load(at, mask=valid, other=0.0)
    else:
        without = load_sets(at, stride, valid, LOW - 1)
        values = tl.join(without, load_sets(at + (stride << (LOW - 1)), stride, valid, LOW - 1))
    return values


@triton.jit
def store_sets(at, values, stride, valid, LOW: tl.constexpr):
    """Write values [B, 2, …, 2] to such a table."""
    if LOW == 0:
        tl.store(at, values, mask=valid)
    else:
        without, joined = tl.split(values)
        store_sets(at, without, stride, valid, LOW - 1)
        store_sets(at + (stride << (LOW - 1)), joined, stride, valid, LOW - 1)


@triton.jit
def beside_sets(values, LOW: tl.constexpr):
    """Values [B] as [B, 1, …, 1]."""
    for _ in tl.static_range(LOW):
        values = tl.expand_dims(values, 1)
    return values


@triton.jit
def sum_over_sets(values, LOW: tl.constexpr):
    """Their sum [B] over the sets."""
    for _ in tl.static_range(LOW):
        values = tl.sum(values, 1)
    return values


@triton.jit
def max_over_sets(values, LOW: tl.constexpr):
    """The largest [B] over the sets; what is NaN does not count."""
    for _ in tl.static_range(LOW):
        values = tl.max(values, 1)
    return values


@triton.jit
def larger(sums, value, best, FUSED: tl.constexpr):
    """max(sums + value, best) of whole numbers. Side by side, the two become Hopper's one instruction for both."""
    if FUSED:
        return tl.inline_asm_elementwise(
            "{ .reg .s32 sum; add.s32 sum, $1, $2; max.s32 $0, sum, $3; }",
            "=r,r,r,r",
            [sums, value, best],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.maximum(sums + value, best)


@triton.jit
def _value(q, valid, unit, SHIFT: tl.constexpr):
    """Similarities [B] with one region."""
    value = tl.load(q, mask=valid, other=0.0)
    # Bits that are masked cost less than a shift: after one, ptxas no longer joins the addition and the maximum.
    return (value * unit).to(tl.int32) & (-1 << SHIFT) if SHIFT >= 0 else value
