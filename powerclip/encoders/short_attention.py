"""Attention of short sequences in Triton: all keys of a head at once, read and differentiated where they lie packed.

A program owns one head of one sequence. Its keys and values, at most 256 of them, lie in shared memory, so that neither
direction goes through them in blocks: no running maximum, and a gradient that is written once, without atomic
additions or a second pass. The gradient goes to where the projection's product reads it.

Axes: C rows · N tokens · H heads · E width of a head
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOKENS = 256
WIDTH = 64  # E
FORWARD_QUERIES, FORWARD_WARPS = 64, 4
BACKWARD_QUERIES, BACKWARD_WARPS = 32, 8


def supports(packed: Tensor) -> bool:
    """Whether queries, keys and values [C, N, 3, H, E] are such as the kernels take."""
    return (
        packed.is_cuda
        and packed.dtype == torch.bfloat16
        and packed.shape[1] <= MOST_TOKENS
        and packed.shape[-1] == WIDTH
    )


@torch.library.custom_op("powerclip::short_attention", mutates_args=())
def attend(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The attended tokens [C, N, H, E], and for their gradient the binary logarithm of each softmax's sum [C, H, N]."""
    count, tokens, _, heads, width = packed.shape
    packed = packed.contiguous()
    attended = packed.new_empty(count, tokens, heads, width)
    log_sums = packed.new_empty(count, heads, tokens, dtype=torch.float32)
    _forward[(count * heads,)](
        packed,
        attended,
        log_sums,
        tokens,
        math.log2(math.e) / math.sqrt(width),
        HEADS=heads,
        WIDTH=width,
        KEYS=max(16, triton.next_power_of_2(tokens)),
        QUERIES=FORWARD_QUERIES,
        num_warps=FORWARD_WARPS,
    )
    return attended, log_sums


@attend.register_fake
def _(packed: Tensor) -> tuple[Tensor, Tensor]:
    count, tokens, _, heads, width = packed.shape
    return packed.new_empty(count, tokens, heads, width), packed.new_empty(count, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("powerclip::short_attention_gradient", mutates_args=())
def gradient(packed: Tensor, attended: Tensor, log_sums: Tensor, of_attended: Tensor) -> Tensor:
    """The gradient of queries, keys and values [C, N, 3, H, E] for that of the attended tokens."""
    count, tokens, _, heads, width = packed.shape
    packed, of_attended = packed.contiguous(), of_attended.contiguous()
    of_packed = torch.empty_like(packed)
    _backward[(count * heads,)](
        packed,
        attended,
        log_sums,
        of_attended,
        of_packed,
        tokens,
        math.log2(math.e) / math.sqrt(width),
        1 / math.sqrt(width),
        HEADS=heads,
        WIDTH=width,
        KEYS=max(64, triton.next_power_of_2(tokens)),
        QUERIES=BACKWARD_QUERIES,
        num_warps=BACKWARD_WARPS,
    )
    return of_packed


@gradient.register_fake
def _(packed: Tensor, attended: Tensor, log_sums: Tensor, of_attended: Tensor) -> Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, of_attended: Tensor, _: Tensor) -> Tensor:
    return gradient(*ctx.saved_tensors, of_attended)


attend.register_autograd(_differentiate, setup_context=_keep)


@triton.jit
def _forward(
    packed,  # [C, N, 3, H, E] bf16
    attended,  # [C, N, H, E] bf16
    log_sums,  # [C, H, N] float32
    tokens,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    ROW: tl.constexpr = HEADS * WIDTH
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    at = packed + row * tokens * 3 * ROW + head * WIDTH
    to = attended + row * tokens * ROW + head * WIDTH
    column, key = tl.arange(0, WIDTH)[None, :], tl.arange(0, KEYS)
    is_key = (key < tokens)[:, None]
    keys = tl.load(at + ROW + key[:, None] * (3 * ROW) + column, mask=is_key, other=0.0)
    values = tl.load(at + 2 * ROW + key[:, None] * (3 * ROW) + column, mask=is_key, other=0.0)
    for start in range(0, tokens, QUERIES):
        query = start + tl.arange(0, QUERIES)
        is_query = (query < tokens)[:, None]
        queries = tl.load(at + query[:, None] * (3 * ROW) + column, mask=is_query, other=0.0)
        logits = tl.dot(queries, tl.trans(keys)) * scale
        logits = tl.where((key < tokens)[None, :], logits, -float("inf"))
        highest = tl.max(logits, 1)
        weights = tl.exp2(logits - highest[:, None])
        total = tl.sum(weights, 1)
        mean = tl.dot(weights.to(packed.dtype.element_ty), values) / total[:, None]
        tl.store(to + query[:, None] * ROW + column, mean.to(packed.dtype.element_ty), mask=is_query)
        tl.store(
            log_sums + tl.program_id(0).to(tl.int64) * tokens + query, highest + tl.log2(total), mask=query < tokens
        )


@triton.jit
def _backward(
    packed,  # [C, N, 3, H, E] bf16
    attended,  # [C, N, H, E] bf16
    log_sums,  # [C, H, N] float32
    of_attended,  # [C, N, H, E] bf16
    of_packed,  # [C, N, 3, H, E] bf16
    tokens,
    scale,
    unit,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    ROW: tl.constexpr = HEADS * WIDTH
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    at = packed + row * tokens * 3 * ROW + head * WIDTH
    to = of_packed + row * tokens * 3 * ROW + head * WIDTH
    out, of_out = attended + row * tokens * ROW + head * WIDTH, of_attended + row * tokens * ROW + head * WIDTH
    column, key = tl.arange(0, WIDTH)[None, :], tl.arange(0, KEYS)
    is_key = (key < tokens)[:, None]
    keys = tl.load(at + ROW + key[:, None] * (3 * ROW) + column, mask=is_key, other=0.0)
    values = tl.load(at + 2 * ROW + key[:, None] * (3 * ROW) + column, mask=is_key, other=0.0)
    of_keys = tl.zeros((KEYS, WIDTH), tl.float32)
    of_values = tl.zeros((KEYS, WIDTH), tl.float32)
    for start in range(0, tokens, QUERIES):
        query = start + tl.arange(0, QUERIES)
        is_query = (query < tokens)[:, None]
        queries = tl.load(at + query[:, None] * (3 * ROW) + column, mask=is_query, other=0.0)
        of_mean = tl.load(of_out + query[:, None] * ROW + column, mask=is_query, other=0.0)
        mean = tl.load(out + query[:, None] * ROW + column, mask=is_query, other=0.0)
        log_sum = tl.load(log_sums + tl.program_id(0).to(tl.int64) * tokens + query, mask=query < tokens, other=0.0)
        shared = tl.sum(of_mean.to(tl.float32) * mean.to(tl.float32), 1)
        # Keys along rows: [KEYS, QUERIES].
        weights = tl.exp2(tl.dot(keys, tl.trans(queries)) * scale - log_sum[None, :])
        # A key that is not there has logit 0: where all others are low, its weight is infinite.
        weights = tl.where(is_key, weights, 0.0)
        of_values = tl.dot(weights.to(packed.dtype.element_ty), of_mean, of_values)
        of_weights = tl.dot(values, tl.trans(of_mean))
        of_logits = (weights * (of_weights - shared[None, :])).to(packed.dtype.element_ty)
        of_keys = tl.dot(of_logits, queries, of_keys)
        of_queries = tl.dot(tl.trans(keys), of_logits) * unit  # [WIDTH, QUERIES]
        tl.store(
            to + query[:, None] * (3 * ROW) + column, tl.trans(of_queries).to(packed.dtype.element_ty), mask=is_query
        )
    tl.store(to + ROW + key[:, None] * (3 * ROW) + column, (of_keys * unit).to(packed.dtype.element_ty), mask=is_key)
    tl.store(to + 2 * ROW + key[:, None] * (3 * ROW) + column, of_values.to(packed.dtype.element_ty), mask=is_key)
