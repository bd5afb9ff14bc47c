"""An encoder that several ranks share: each embeds some rows of what is asked for, and all get all of them.

All ranks run the same evaluation on the same batches, so that none of it has to know.

Axes: C rows of a batch · c rows of each rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from powerclip.encoders import DualEncoder
from powerclip.runtime.distributed import Ranks

Embedded = TypeVar("Embedded", Tensor, tuple[Tensor, Tensor])


def spread_encoder(encoder: DualEncoder, ranks: Ranks) -> DualEncoder:
    """The encoder, its work shared among ranks; itself where there is only one."""
    return encoder if ranks.is_single else SpreadEncoder(encoder, ranks)


class SpreadEncoder(DualEncoder):
    """An encoder with the weights of another one."""

    def __init__(self, encoder: DualEncoder, ranks: Ranks):
        super().__init__(encoder.clip, encoder.config)
        self._ranks = ranks

    def encode_image(self, images: Tensor) -> Tensor:
        """As the encoder's own, of rows that all ranks have."""
        return self._spread(super().encode_image, images)

    def encode_patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """As the encoder's own, of rows that all ranks have."""
        return self._spread(super().encode_patches, images)

    def encode_text(self, tokens: Tensor) -> Tensor:
        """As the encoder's own, of rows that all ranks have."""
        return self._spread(super().encode_text, tokens)

    def encode_words(self, tokens: Tensor | tuple[Tensor, ...], *, dense: bool = True) -> tuple[Tensor, Tensor]:
        """As the encoder's own, of rows that all ranks have."""
        if isinstance(tokens, tuple):
            return super().encode_words(tokens, dense=dense)  # group by group, through here
        return self._spread(partial(super().encode_words, dense=dense), tokens)

    def _spread(self, embed: Callable[[Tensor], Embedded], rows: Tensor) -> Embedded:
        count = len(rows)
        if count == 0:
            return embed(rows)
        # The last rows are repeated where they do not divide: a message has the same size on each rank.
        share = -(-count // self._ranks.count)
        padded = torch.cat([rows, rows[-1:].expand(share * self._ranks.count - count, *rows.shape[1:])])
        found = embed(padded[self._ranks.rows(share)])
        if isinstance(found, tuple):
            return tuple(self._ranks.gather(part)[:count] for part in found)  # type: ignore[return-value]
        return self._ranks.gather(found)[:count]
