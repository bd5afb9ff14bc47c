"""Mosaics: four images of a batch as one, in which every phrase of their captions must find the tile of its own image.

    L_find = − mean_i mean_{B of caption i} log softmax_j (c · s(B, tile j))_{j = i}
    s(B, tile) = ⟨φ_tile, p_B⟩                           by means: φ_tile is the tile's embedding as a region (Eq. 2)
               = 1/c · log Σ_{n in the tile} exp(c · ⟨v_n, p_B⟩)   by patches: the best ones answer for their tile

j runs over the tiles of all mosaics of the batch. The middle of the image and what stands out win nothing there: every
tile has a middle, and each of the four images is as salient as the others. And a patch that carries its whole image, as
deep patches do, answers for three wrong tiles.

Mosaics give gold sets for free. Captions of tiles 1 and 3 together are one phrase, whose best set of tiles is {1, 3}:

    L_sets = − mean over mosaics and over their 15 sets B of log softmax_A (c · Q_AB)_{A = B}, over A and over B alike
    Q_AB = ⟨Σ_A φ_tile, Σ_B t⟩ / (|Σ_A φ_tile| |Σ_B t|),   t the mean of a caption's p_B, normalised

Axes: c images of this rank · G mosaics of this rank, 4·G tiles · K nodes of a caption · N patches · D width
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_dataclass

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.pooling import normalise
from powerclip.alignment.regions import embed_regions, subset_matrix
from powerclip.encoders.hf_text import is_hf_text
from powerclip.encoders.text import text_tower
from powerclip.encoders.vision import dropout_selector
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

SIDE = 2  # tiles in a row and in a column
TILES = SIDE * SIDE
# Tokens are told apart by so many classes: enough for CLIP's vocabulary. Of a larger one, two may be taken for one.
TOKEN_CLASSES = 2**16


@dataclass(frozen=True)
class MosaicFeatures:
    """What the image tower gives for the mosaics of a batch."""

    patches: Tensor  # [G, N, D]
    tiles: Tensor  # [G, 4, N] bool: the patches of each tile, row by row


register_dataclass(MosaicFeatures)


def check_towers(encoder: DualEncoder, config: AlignmentConfig) -> None:
    """UserError when mosaics, or the texts for them, cannot go through these towers."""
    if dropout_selector(encoder.clip.visual) is not None:
        raise UserError("alignment.mosaics needs all patches of a tile: set vision_cfg.patch_dropout to 0")
    if min(encoder.grid) < SIDE:
        raise UserError(f"alignment.mosaics needs a grid of {SIDE} × {SIDE} patches or more, not {encoder.grid}")
    tower = text_tower(encoder.clip)
    if config.mosaic_texts != "none" and is_hf_text(tower) and tower.config.pad_token_id != 0:
        raise UserError(
            f"alignment.mosaic_texts: {config.mosaic_texts} needs a text tower that pads with token 0, as CLIP's and "
            f"BERT's do, not with {tower.config.pad_token_id}"
        )


def check_rows(config: AlignmentConfig, batch: int, parts: int) -> None:
    """UserError unless each of the `parts` of a batch, which go through the towers by themselves, holds mosaics."""
    size = group_size(config.mosaics)
    if batch // parts % size:
        share = f"each of {parts} parts has {batch // parts}" if parts > 1 else f"it is {batch}"
        raise UserError(
            f"alignment.mosaics: {config.mosaics:g} makes a mosaic of every {size} images, and train.batch_size must "
            f"be a multiple of {size * parts}: {share}"
        )


# ---- images ----------------------------------------------------------------------------------------------------------


def group_size(share: float) -> int:
    """Of how many images of a batch in a row the first four make a mosaic, so that a `share` of all is in one."""
    return round(TILES / share)


def in_mosaics(values: Tensor, share: float) -> Tensor:
    """Of values [c, …], those of the images that are in mosaics, mosaic by mosaic [G, 4, …]."""
    size = group_size(share)
    count = len(values) // size
    return values[: count * size].unflatten(0, (count, size))[:, :TILES]


def seam_cells(draws: Tensor, cells: int, range_: float) -> Tensor:
    """Where the first tiles end, in patches, from uniform numbers: even over the middle `range_` of `cells` patches."""
    first = max(1, math.ceil(cells * (1 - range_) / 2))
    return (first + draws * (cells - 2 * first + 1)).long().clamp(max=cells - first)


def tile_masks(seams: Tensor, grid: tuple[int, int]) -> Tensor:
    """The patches of each tile [G, 4, N], from the rows and columns of patches [G, 2] in the first tile."""
    above = torch.arange(grid[0], device=seams.device) < seams[:, :1]
    left = torch.arange(grid[1], device=seams.device) < seams[:, 1:]
    rows, columns = torch.stack([above, ~above], 1), torch.stack([left, ~left], 1)
    return (rows[:, :, None, :, None] & columns[:, None, :, None, :]).flatten(3).flatten(1, 2)


def glue(images: Tensor, seams: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mosaics [G, 3, H, W] of images [G, 4, 3, H, W], each shrunk into its tile, pixels by the area that they cover."""
    height, width = images.shape[-2:]
    rows = shrinking(seams[:, 0] * (height // grid[0]), height)  # [G, 2, H, H]
    columns = shrinking(seams[:, 1] * (width // grid[1]), width)
    by_row = images.float().unflatten(1, (SIDE, SIDE))  # [G, 2, 2, 3, H, W]
    shrunk = (rows[:, :, None, None] @ by_row).sum(1)  # [G, 2, 3, H, W]
    return (shrunk @ columns[:, :, None].mT).sum(1).to(images.dtype)


def shrinking(ends: Tensor, pixels: int) -> Tensor:
    """How much of each pixel of a line goes into each of the line's first `ends` [G] pixels, and into the others.

    [G, 2, pixels, pixels]: two lines are shrunk to `ends` and `pixels − ends`; what is not theirs has zeros.
    """
    place = torch.arange(pixels, device=ends.device)
    ends = ends[:, None]
    starts, lengths = torch.stack([ends * 0, ends], 1), torch.stack([ends, pixels - ends], 1)  # [G, 2, 1]
    step = pixels / lengths
    begin = (place - starts) * step  # [G, 2, pixels], in pixels of the line that is shrunk
    inside = (place >= starts) & (place < starts + lengths)
    covered = torch.minimum((begin + step)[..., None], place + 1.0) - torch.maximum(begin[..., None], place * 1.0)
    return torch.where(inside[..., None], covered.clamp(min=0) / step[..., None], 0.0)


# ---- the losses ------------------------------------------------------------------------------------------------------


def tile_logits(
    features: MosaicFeatures, nodes: Tensor, config: AlignmentConfig, scale: Tensor, ranks: Ranks = SINGLE
) -> tuple[Tensor, Tensor]:
    """c · s(B, tile) [4·G, K, tiles of all ranks] of nodes [4·G, K, D], and the tiles' embeddings here [G, 4, D]."""
    tiles = embed_regions(features.patches, features.tiles, config.centre, ranks)
    if config.mosaic_pool == "mean":
        return scale * nodes @ ranks.gather(tiles.flatten(0, 1)).T, tiles
    patches = features.patches.float()
    patches = F.normalize(patches - ranks.mean(patches.mean((0, 1))), dim=-1)
    patches, masks = ranks.gather(patches), ranks.gather(features.tiles)
    # By mosaic, [mosaics, 4·G·K, N]: all four tiles are sums over the same exponentials.
    logits = (scale * nodes.flatten(0, 1)) @ patches.mT
    highest = logits.detach().amax(-1, keepdim=True)
    sums = (logits - highest).exp() @ masks.mT.to(logits.dtype)
    # A tile whose best patch is e^-87 of the mosaic's best does not compete; it must not be log 0.
    by_tile = sums.clamp(min=torch.finfo(sums.dtype).tiny).log() + highest
    return by_tile.movedim(0, 1).flatten(1).unflatten(0, nodes.shape[:2]), tiles


def find_tile_loss(logits: Tensor, own: Tensor, real: Tensor, also: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """L_find of this rank's captions, and the share of their nodes whose own tile is the best.

    Args:
        logits: [4·G, K, tiles].
        own: the tile of each node [4·G, K].
        real: which nodes there are [4·G, K].
        also: tiles that a node could mean as well as its own [4·G, K, tiles]: they do not compete.
    """
    if also is not None:
        is_own = own.unsqueeze(-1) == torch.arange(logits.shape[-1], device=own.device)
        logits = logits.masked_fill(also & ~is_own, torch.finfo(logits.dtype).min)
    losses = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="none").view_as(own)
    hits = logits.argmax(-1) == own
    count = real.sum(1).clamp(min=1)
    return (torch.where(real, losses, 0.0).sum(1) / count).mean(), ((hits & real).sum(1) / count).mean()


def competing(logits: Tensor, first: int, scope: str) -> Tensor:
    """The logits [4·G, K, tiles], only within its own mosaic for scope `own`; `first` is this rank's first tile."""
    if scope == "all":
        return logits
    mosaic = (first + torch.arange(len(logits), device=logits.device)) // TILES
    other = mosaic[:, None] != torch.arange(logits.shape[-1], device=logits.device) // TILES
    return logits.masked_fill(other[:, None], torch.finfo(logits.dtype).min)


def holds_all_words(
    tokens: Tensor, words: Tensor, start: Tensor, end: Tensor, of_tiles: Tensor, words_of_tiles: Tensor
) -> Tensor:
    """Whether all words of a range of tokens occur in a tile's caption: [rows, K, tiles] bool.

    "A man" could be in any tile whose caption has a man.

    Args:
        tokens: [rows, L].
        words: which of them are words [rows, L] bool.
        start: the first token of each range [rows, K].
        end: one past its last token [rows, K].
        of_tiles: the captions of all tiles [tiles, L].
        words_of_tiles: which of their tokens are words, likewise.
    """
    # One row more for what is no word.
    classes = torch.where(words_of_tiles, of_tiles % TOKEN_CLASSES, TOKEN_CLASSES)
    occurs = torch.zeros(TOKEN_CLASSES + 1, len(of_tiles), dtype=torch.bool, device=tokens.device)
    occurs[classes, torch.arange(len(of_tiles), device=tokens.device)[:, None]] = True
    missing = ~occurs[tokens % TOKEN_CLASSES] & words.unsqueeze(-1)  # [rows, L, tiles]
    before = F.pad(missing.cumsum(1, dtype=torch.int32), (0, 0, 1, 0))
    row = torch.arange(len(tokens), device=tokens.device)[:, None]
    return before[row, end] == before[row, start]


def gather_rows(tokens: Tensor, words: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Captions [4·G, L] and which of their tokens are words, of all ranks: each has rows as long as its own longest."""
    if ranks.is_single:
        return tokens, words
    missing = max(length for (length,) in ranks.numbers(tokens.shape[1])) - tokens.shape[1]
    return ranks.gather(F.pad(tokens, (0, missing))), ranks.gather(F.pad(words, (0, missing)))


def set_loss(tiles: Tensor, captions: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """L_sets of tiles [G, 4, D] and captions [G, 4, D], all of length 1, and the share of gold best sets."""
    sets = subset_matrix(TILES, empty=False, device=tiles.device).to(tiles.dtype)
    cosines = normalise(sets @ tiles) @ normalise(sets @ captions).mT  # [G, A, B]
    gold = torch.arange(len(sets), device=tiles.device).expand(len(tiles), -1)
    logits = scale * cosines
    loss = (F.cross_entropy(logits, gold) + F.cross_entropy(logits.mT, gold)) / 2
    return loss, (cosines.argmax(1) == gold).float().mean()
