"""Masks as a few bytes: bits on a 64 × 64 grid over the whole image, whatever its shape.

64 cells are four to a patch of a 16 × 16 grid, and still two when a crop keeps half of the image's side. A mask is
stored in whichever of these forms is shortest; the first byte says which:

- the lengths of its runs in row order, deflated;
- the lengths of the runs of what changes from each row to the next, deflated (fewer, for upright shapes);
- the bits of a 32 × 32 grid, 128 bytes: only for masks so ragged (noise) that no other stays within `LARGEST` bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GRID = 64
LARGEST = 150  # bytes

Mask = npt.NDArray[np.bool_]
_RUNS, _CHANGES, _COARSE = b"r", b"c", b"b"


def pack_mask(mask: Mask) -> bytes:
    """A mask [GRID, GRID] in at most `LARGEST` bytes. Read back it is the same, unless it had to be stored coarsely."""
    if mask.shape != (GRID, GRID):
        raise ValueError(f"a mask of {mask.shape} cells: expected {GRID} × {GRID}, see to_grid")
    changes = mask.copy()
    changes[1:] ^= mask[:-1]
    packed = min(_RUNS + _pack_runs(mask), _CHANGES + _pack_runs(changes), key=len)
    return packed if len(packed) <= LARGEST else _COARSE + np.packbits(to_grid(mask, GRID // 2)).tobytes()


def unpack_mask(packed: bytes) -> Mask:
    """The mask [GRID, GRID] that `pack_mask` stored.

    Raises:
        ValueError: these bytes are no mask.
    """
    form, data = packed[:1], packed[1:]
    if form == _COARSE and len(data) == GRID * GRID // 4 // 8:
        coarse = np.unpackbits(np.frombuffer(data, np.uint8)).reshape(GRID // 2, GRID // 2).view(np.bool_)
        return coarse.repeat(2, axis=0).repeat(2, axis=1)
    if form not in (_RUNS, _CHANGES):
        raise ValueError("these bytes are no packed mask")
    bits = _unpack_runs(data)
    return bits if form == _RUNS else np.logical_xor.accumulate(bits, axis=0)


def unpack_masks(packed: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Several masks [masks, GRID, GRID]."""
    masks = np.empty((len(packed), GRID, GRID), np.bool_)
    for at, mask in enumerate(packed):
        masks[at] = unpack_mask(mask)
    return masks


def to_grid(mask: Mask, grid: int = GRID) -> Mask:
    """A mask of any size on a square grid: cells of which at least half is covered; if there is none, the most covered.

    So a mask that has a pixel has a cell.
    """
    cover = _average(_average(mask.astype(np.float32), grid).T, grid).T
    cells = cover >= min(0.5, float(cover.max(initial=0)))
    return cells & (cover > 0)


def _average(values: npt.NDArray[np.float32], cells: int) -> npt.NDArray[np.float32]:
    """Rows averaged into `cells` equal strips; a row that two strips share counts in both for its part."""
    rows = len(values)
    if rows == cells:
        return values
    total = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0, dtype=np.float64)])
    edges = np.arange(cells + 1) * (rows / cells)
    whole = np.minimum(edges.astype(np.int64), rows - 1)
    upto = total[whole] + (edges - whole)[:, None] * values[whole]  # the sum of all rows above each edge
    return (np.diff(upto, axis=0) * (cells / rows)).round(6).astype(np.float32)


def _pack_runs(bits: Mask) -> bytes:
    """Lengths of the runs of equal bits, beginning with zeros; one of 255 or more is 255 and what is left."""
    flat = bits.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    lengths = np.diff(np.concatenate([[0] * (1 + bool(flat[0])), edges, [flat.size]]))
    full, rest = np.divmod(lengths, 255)
    written = np.full(int(full.sum()) + len(lengths), 255, np.uint8)
    written[np.cumsum(full + 1) - 1] = rest
    return _deflate(written.tobytes())


def _unpack_runs(data: bytes) -> Mask:
    try:
        written = np.frombuffer(zlib.decompress(data, wbits=-15), np.uint8)
    except zlib.error:
        raise ValueError("these bytes are no packed mask") from None
    ends = np.flatnonzero(written != 255)
    total = np.cumsum(written, dtype=np.int64)[ends]
    if not len(ends) or ends[-1] != len(written) - 1 or total[-1] != GRID * GRID:
        raise ValueError("these bytes are no packed mask")
    lengths = total.copy()
    lengths[1:] -= total[:-1]  # np.diff with a prefix takes half of all the time
    ones = np.arange(len(lengths)) % 2 == 1
    return np.repeat(ones, lengths).reshape(GRID, GRID)


def _deflate(data: bytes) -> bytes:
    """Deflated without a header; huffman codes alone suit lengths that seldom repeat."""
    forms = []
    for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_FIXED):
        coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
        forms.append(coder.compress(data) + coder.flush())
    return min(forms, key=len)
