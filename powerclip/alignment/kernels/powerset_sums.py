"""Sums over the sets of regions and their derivatives, as the NLA kernels compute them in registers.

With x_m = q_m/τ the sums over the regions are X = Σ x, R = Σ relu(x) and P = (Π (1 + e^−|x|) − 1) / e^h, all without
cancellation. Then log Σ_A exp Σ_A x, the soft maximum over the sets that both aggregations need, is

    with ∅      R + log(1 + P),                                       h = 0
    without     L + log(1 − e^−L) for L = R + log(1 + P) where some x > 0, h = 0,
                h + log P where none is, h being the highest x: P is at least 1 and nothing underflows

and its derivative by x_m is the set weight w_m: σ(x_m) with the empty set; without it σ(x_m) / (1 − e^−L), or
softmax(x)_m where all x are far below zero. With s_k the softmax over a caption's nodes and G the gradient of
its score,

    ∂/∂q_m = G · ((1/K + α·s_k) · w_m + s_k · (1−α) · c),    c = 2^(M−1) / number of sets

When a phrase's best set is a single region (largest_set: 1), 1/K goes to the highest q instead.

In the code: X is `plain`, R `positive`, P `product`, h `base` and e^h `unit`.

Axes: K nodes of a caption · M regions
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import triton
import triton.language as tl

LN2 = tl.constexpr(math.log(2))


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x. FAST is the GPU's own instruction, without the care for results below 1e-38 that would triple it."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def exp(x, FAST: tl.constexpr):
    """e^x, likewise."""
    return exp2(x * (1.0 / LN2), FAST)


@triton.jit
def powerset_product(x, base, unit, FAST: tl.constexpr):
    """P over the regions, the second axis of x. All in units of ln 2."""
    product, unit = tl.reduce((exp2(-tl.abs(x) - base, FAST), tl.broadcast_to(unit, x.shape)), 1, _join_products)
    return product


@triton.jit
def _join_products(a, unit, b, same_unit):
    """((1 + e^h·a)(1 + e^h·b) − 1) / e^h without the cancellation, and e^h, which both have."""
    return a + b + unit * a * b, unit


@triton.jit
def log_powerset(positive, product, highest, base, EMPTY: tl.constexpr):
    """The soft maximum over the sets, from the sums over the regions."""
    soft = positive + tl.log(1.0 + product)
    if not EMPTY:
        above = soft + tl.log(1.0 - tl.exp(-tl.maximum(soft, 0.5)))
        soft = tl.where(highest > 0.0, above, base + tl.log(tl.maximum(product, 1.0)))
    return soft


@triton.jit
def best_set(soft, highest, EMPTY: tl.constexpr, SINGLE: tl.constexpr):
    """The best set's x: the soft maximum, or the best single region's."""
    if SINGLE:
        return tl.maximum(highest, 0.0) if EMPTY else highest
    return soft


@triton.jit
def weight_unit(soft, product, highest, unit, EMPTY: tl.constexpr, FAST: tl.constexpr):
    """The factor of all set weights of a node: 1 with ∅, without it 1/(1 − e^−L), in units of e^h."""
    if EMPTY:
        return tl.full(soft.shape, 1.0, tl.float32)
    return tl.where(highest > 0.0, 1.0 + exp(-tl.maximum(soft, -80.0), FAST), unit + 1.0 / tl.maximum(product, 1.0))


@triton.jit
def set_weight(x, base, unit, shared, FAST: tl.constexpr):
    """w_m, the derivative of the soft maximum over the sets by one region's x; `shared` is `weight_unit`."""
    v = exp(-tl.abs(x) - base, FAST)
    return shared * tl.where(x > 0.0, 1.0, v) / (1.0 + unit * v)
