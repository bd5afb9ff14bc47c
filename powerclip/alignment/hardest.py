"""Each image's and each caption's hardest negatives, kept while scores stream by: c × C is never in memory.

Axes: c images here, of the C pairs of the batch · k negatives of each · R rows, Q columns of one block
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.alignment.contrast import highest

# A block of scores is at most 64 MB.
BLOCK_ROWS = BLOCK_COLUMNS = 4096


@dataclass(frozen=True)
class Found:
    """The highest scores of each row, and the columns that have them."""

    scores: Tensor  # [R, k]
    columns: Tensor  # [R, k]


def hardest_pairs(
    score: Callable[[slice, slice], Tensor],
    images: range,
    captions: int,
    k: int,
    rows: int = BLOCK_ROWS,
    columns: int = BLOCK_COLUMNS,
) -> tuple[Found, Found]:
    """The k highest-scored captions of each image [c, k] and images of each caption [C, k], matched pairs left out.

    `images` are those here, by their numbers in the batch; where they are fewer than k, a caption gets as many.
    `score` gives the scores [R, Q] of a block: a range of the images here, counted from 0, with a range of captions.
    """
    k = min(k, captions - 1)
    of_images: dict[int, Found] = {}
    of_captions: dict[int, Found] = {}
    for top in range(0, len(images), rows):
        some = images[top : top + rows]
        for left in range(0, captions, columns):
            right = min(left + columns, captions)
            block = score(slice(top, top + len(some)), slice(left, right)).detach()
            row = torch.arange(some.start, some.stop, device=block.device)
            column = torch.arange(left, right, device=block.device)
            block = block.masked_fill(row.unsqueeze(-1) == column, -torch.inf)
            of_images[top] = _merge(of_images.get(top), block, column, k)
            of_captions[left] = _merge(of_captions.get(left), block.T, row, k)
    return _joined(of_images.values()), _joined(of_captions.values())


def _merge(found: Found | None, block: Tensor, names: Tensor, k: int) -> Found:
    """The k highest of what was found and of scores [R, Q], whose columns are called `names` [Q]."""
    # First the block's own best, then those against the old ones: the block is read once and not copied.
    scores, place = highest(block, min(k, block.shape[1]))
    columns = names[place]
    if found is None:
        return Found(scores, columns)
    scores, columns = torch.cat([found.scores, scores], -1), torch.cat([found.columns, columns], -1)
    scores, place = highest(scores, min(k, scores.shape[1]))
    return Found(scores, columns.gather(-1, place))


def _joined(parts: Iterable[Found]) -> Found:
    """Rows of all parts, one after the other."""
    scores, columns = zip(*((part.scores, part.columns) for part in parts), strict=True)
    return Found(torch.cat(scores), torch.cat(columns))
