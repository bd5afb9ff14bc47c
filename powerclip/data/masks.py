"""Stored masks as regions of a crop: they follow the image through its crop onto the patch grid (§3.2).

Axes: M regions · N patches · G cells of a mask's side
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from powerclip.data.keyed_random import permutation
from powerclip.data.mask_codec import GRID, unpack_masks

# Of a patch that belongs to a region at least this share is covered.
HALF = 0.5
_CELLS = np.arange(GRID, dtype=np.float32)


def choose_regions(
    packed: Sequence[bytes],
    count: int,
    box: tuple[float, float, float, float],
    grid: tuple[int, int],
    key: int,
) -> npt.NDArray[np.bool_]:
    """Up to `count` of an image's masks, drawn at random, as patches of a crop: [regions, N].

    A mask of which the crop shows nothing is left out, and another drawn.

    Args:
        packed: the stored masks.
        count: M.
        box: the crop: left, top, right, bottom as shares of the image.
        grid: rows and columns of patches.
        key: of the draw.

    Raises:
        ValueError: a stored mask is none.
    """
    rows, columns = overlap(box[1], box[3], grid[0]), overlap(box[0], box[2], grid[1])
    order = permutation(key, len(packed)).tolist()
    regions = np.zeros((0, grid[0] * grid[1]), np.bool_)
    while order and len(regions) < count:
        # As many as are missing at once: numpy's calls cost more than the work in them.
        drawn, order = order[: count - len(regions)], order[count - len(regions) :]
        masks = unpack_masks([packed[number] for number in drawn]).astype(np.float32)
        region = _patches((rows @ masks @ columns.T).reshape(len(drawn), -1))
        regions = np.concatenate([regions, region[region.any(1)]])
    return regions


def overlap(start: float, end: float, cells: int) -> npt.NDArray[np.float32]:
    """How much of each of a crop's `cells`, side by side from `start` to `end`, every cell of a mask takes: [cells, G].

    Rows sum to 1: this times a mask is the mask's mean over each cell.
    """
    edges = np.linspace(start * GRID, end * GRID, cells + 1, dtype=np.float32)
    # How far each edge reaches into each cell; what lies between two edges is the difference.
    reach = (edges[:, None] - _CELLS).clip(0, 1)
    return (reach[:-1] - reach[1:]) / (edges[0] - edges[-1]) * cells


def _patches(cover: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """The patches [masks, N] of which a mask covers half; if that is none, the one that it covers most.

    None only where nothing is covered.
    """
    cover = cover.round(6)  # where nothing is left but rounding, there is nothing
    return (cover >= np.minimum(HALF, cover.max(1, keepdims=True))) & (cover > 0)
