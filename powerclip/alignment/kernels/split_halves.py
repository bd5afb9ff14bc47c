"""The two float16 halves of float32 numbers (see `matmul.py`) in one pass, in Triton.

Axes: R rows · D width · … anything
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS, WARPS = 2048, 4  # 16 numbers for each thread


def write_halves(values: Tensor, high: Tensor, low: Tensor, high_copy: Tensor | None = None) -> None:
    """Write the rounded float32 values […, D] to `high`, what that lost to `low`, and `high` once more to `high_copy`.

    Those are float16 […, D], each a contiguous tensor or the same slice of the rows of one.
    """
    values, width = values.contiguous(), values.shape[-1]
    rows = values.numel() // max(1, width)
    if not rows:
        return
    tile_width = triton.next_power_of_2(width)
    tile_rows = max(1, TILE_ELEMENTS // tile_width)
    _write_halves[(triton.cdiv(rows, tile_rows),)](
        values,
        high,
        low,
        high if high_copy is None else high_copy,
        rows,
        width,
        high.stride(-2),
        COPY=high_copy is not None,
        TILE_R=tile_rows,
        TILE_D=tile_width,
        num_warps=WARPS,
    )


@triton.jit
def _write_halves(
    values,  # [R, D] float32
    high,  # [R, D] float16, its rows `stride` apart, as those of the next two
    low,
    high_copy,
    rows,
    width,
    stride,
    COPY: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)[:, None]
    column = tl.arange(0, TILE_D)[None, :]
    valid = (row < rows) & (column < width)
    value = tl.load(values + row * width + column, mask=valid, other=0.0)
    rounded = value.to(tl.float16)
    offset = row * stride + column
    tl.store(high + offset, rounded, mask=valid)
    if COPY:
        tl.store(high_copy + offset, rounded, mask=valid)
    tl.store(low + offset, (value - rounded.to(tl.float32)).to(tl.float16), mask=valid)
