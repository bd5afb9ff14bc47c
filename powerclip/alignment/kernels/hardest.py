"""Each image's and each caption's hardest negatives, kept while scores stream by: C × C is never in memory.

Axes: C pairs of the batch · k negatives of each · R rows, Q columns of one block
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from powerclip.alignment.contrast import highest

# A block of scores is at most 64 MB.
BLOCK_ROWS = BLOCK_COLUMNS = 4096


def hardest_pairs(
    score: Callable[[slice, slice], Tensor],
    count: int,
    k: int,
    rows: int = BLOCK_ROWS,
    columns: int = BLOCK_COLUMNS,
) -> tuple[Tensor, Tensor]:
    """The k highest-scored captions of each image and images of each caption, [C, k] both, matched pairs left out.

    `score` gives the scores [R, Q] of a block: a range of images with a range of captions.
    """
    k = min(k, count - 1)
    captions, images = _Running(count, k), _Running(count, k)
    for top in range(0, count, rows):
        some_images = slice(top, min(top + rows, count))
        for left in range(0, count, columns):
            some_captions = slice(left, min(left + columns, count))
            block = score(some_images, some_captions).detach()
            row = torch.arange(some_images.start, some_images.stop, device=block.device)
            column = torch.arange(some_captions.start, some_captions.stop, device=block.device)
            block = block.masked_fill(row.unsqueeze(-1) == column, -torch.inf)
            captions.add(block, some_images, column)
            images.add(block.T, some_captions, row)
    return captions.found(), images.found()


class _Running:
    """The k highest of each of C rows, so far."""

    def __init__(self, count: int, k: int) -> None:
        self.count, self.k = count, k
        self.values: Tensor | None = None  # [C, k]
        self.index: Tensor | None = None  # [C, k]

    def add(self, block: Tensor, rows: slice, names: Tensor) -> None:
        """Take in scores [R, Q] of some rows, whose columns are called `names` [Q]."""
        if self.values is None or self.index is None:
            self.values = block.new_full((self.count, self.k), -torch.inf)
            self.index = torch.zeros(self.count, self.k, dtype=torch.long, device=block.device)
        # First the block's own best, then those against the old ones: the block is read once and not copied.
        fresh, place = highest(block, min(self.k, block.shape[1]))
        values = torch.cat([self.values[rows], fresh], -1)
        index = torch.cat([self.index[rows], names[place]], -1)
        self.values[rows], best = highest(values, self.k)
        self.index[rows] = index.gather(-1, best)

    def found(self) -> Tensor:
        """Columns [C, k] of each row's highest."""
        if self.index is None:
            raise ValueError("no block was added")
        return self.index
