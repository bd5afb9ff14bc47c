"""SAM's mask decoder on a GPU: the same masks as `PointSegmenter.segment`, from kernels, with one copy to the host.

Tokens go through the decoder's own modules; what happens at the cells of the image is in `sam_kernels.py`, from where
masks come as bits, with the counts that area and stability follow from. Which are good, their cells on the sidecars'
grid and which of them are the same again is found on the device too, for all images of a batch, without waiting for it.

Axes: B images · P points · n points of all images · T tokens, padded to 8 · S cells of the image grid · D width ·
K masks of a point · R candidates of an image, the best first · G cells of a side of the sidecars' grid
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.annotate.segmenters.base import Masks
from powerclip.annotate.segmenters.overlap import mask_iou
from powerclip.annotate.segmenters.points import PointOptions, extent_cells, point_grid
from powerclip.annotate.segmenters.sam_decoder import MASKS, Attention, MaskDecoder, PointEncoder, TwoWayLayer
from powerclip.data.mask_codec import GRID

if TYPE_CHECKING:
    from powerclip.annotate.segmenters.sam_kernels import Update

_HEADS, _TOKENS = 8, 8  # of the kernels
_LOG2E = 1 / math.log(2)
# Candidates of an image that are compared with each other; if an image of a batch has more, all are, a second time.
_CANDIDATES = 256


NO_KERNELS = (
    "fast=true computes by Triton kernels, for SAM's released sizes, on a GPU of compute capability 8.0 or more"
)


def is_possible(device: torch.device) -> bool:
    """Whether the kernels run there: they need Triton and tensor cores that take half precision (Ampere or newer)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class Encoded:
    """What the decoder needs of some images."""

    image: Tensor  # [B, S, D] features, with what stands for "no mask given"
    positions: Tensor  # [S, D]
    columns: int  # of the image grid
    details: tuple[Tensor, Tensor] | None = None  # finer features, see `sam_kernels.draw`


@dataclass(frozen=True)
class Candidates:
    """The masks of all points of some images."""

    words: Tensor  # [B, R, S] int16: the fine cells of each cell
    counts: Tensor  # [B, R, 3] of fine cells above 0, 1 and -1
    quality: Tensor  # [B, R]


class FastDecoder:
    """A mask decoder with its weights as the kernels take them.

    Args:
        decoder: with weights; it is converted to `dtype`.
        dtype: of features and products, whose sums are in float32. float16 has three bits more than bfloat16, and
            nothing in these networks comes near its largest number.
    """

    def __init__(self, decoder: MaskDecoder, dtype: torch.dtype = torch.float16):
        from powerclip.annotate.segmenters.sam_kernels import Upscaling

        steps: Any = decoder.output_upscaling
        first, norm, _, second, _ = steps
        self.upscaling = Upscaling(
            first=first.weight.permute(2, 3, 0, 1).flatten(0, 1).to(dtype).contiguous(),  # [4, D, D/4]
            first_bias=first.bias.float(),
            norm_weight=norm.weight.float(),
            norm_bias=norm.bias.float(),
            eps=norm.eps,
            second=second.weight.permute(0, 2, 3, 1).flatten(1).to(dtype).contiguous(),  # [D/4, 4·D/8]
            second_bias=second.bias.float().repeat(4),
        )
        self.decoder, self.dtype = decoder.to(dtype), dtype

    def decode(self, encoded: Encoded, prompts: Tensor, extent: Tensor, least: float) -> Candidates:
        """The masks of points of which one is expected to reach an IoU of `least`; those of others have no area.

        Args:
            encoded: the images.
            prompts: [B, P, 2, D] points as tokens.
            extent: [B, 2] fine rows and columns that lie in each image, int32.
            least: see above.
        """
        from powerclip.annotate.segmenters.sam_kernels import draw

        tokens, image = self._attend(self.decoder.with_learned(prompts.to(self.dtype)), encoded)
        quality = self.decoder.qualities(tokens)
        words, counts = draw(
            image,
            quality.amax(-1).flatten() >= least,
            self.decoder.kernels(tokens).flatten(0, 1),
            self.upscaling,
            extent,
            encoded.columns,
            encoded.details,
        )
        by_image = len(prompts), prompts.shape[1] * MASKS
        return Candidates(words.view(*by_image, -1), counts.reshape(*by_image, 3), quality.reshape(by_image))

    def _attend(self, prompts: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Tokens [B, P, T, D] and cells [n, S, D] after the decoder's transformer, from prompts [B, P, T, D]."""
        from powerclip.annotate.segmenters.sam_kernels import attend, update

        transformer = self.decoder.transformer
        one, two = (layer for layer in transformer.layers if isinstance(layer, TwoWayLayer))
        final = transformer.final_attn_token_to_image
        tokens = one.norm1(one.self_attn(prompts, prompts, prompts))
        tokens = one.norm2(tokens + _read_shared(one.cross_attn_token_to_image, tokens + prompts, encoded))
        tokens = one.norm3(tokens + one.mlp(tokens))
        placed = tokens + prompts
        image = update(encoded.image, encoded.positions, _update(one, tokens, placed))
        tokens = two.norm1(tokens + two.self_attn(placed, placed, tokens))
        reader = two.cross_attn_token_to_image
        attended = attend(image, encoded.positions, _queries(reader, tokens + prompts))
        tokens = two.norm2(tokens + _project(reader, attended, tokens))
        tokens = two.norm3(tokens + two.mlp(tokens))
        placed = tokens + prompts
        image = update(image, encoded.positions, _update(two, tokens, placed))
        attended = attend(image, encoded.positions, _queries(final, placed))
        return transformer.norm_final_attn(tokens + _project(final, attended, tokens)), image


def _read_shared(attention: Attention, tokens: Tensor, encoded: Encoded) -> Tensor:
    """What tokens [B, P, T, D] read of images that are the same for all points: all of them are queries together."""

    def heads(x: Tensor) -> Tensor:  # [B, …, inner] → [B, 8, …, inner/8]
        return x.unflatten(-1, (_HEADS, -1)).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(
        heads(attention.q_proj(tokens.flatten(1, 2))),
        heads(attention.k_proj(encoded.image + encoded.positions)),
        heads(attention.v_proj(encoded.image)),
    )
    return attention.out_proj(mixed.transpose(1, 2).flatten(2)).view_as(tokens)


def _update(layer: TwoWayLayer, tokens: Tensor, placed: Tensor) -> Update:
    """How a layer changes the image by its tokens, which are also given with their positions."""
    from powerclip.annotate.segmenters.sam_kernels import Update

    attention = layer.cross_attn_image_to_token
    keys, values = attention.k_proj(placed) * _unit(attention), attention.v_proj(tokens)
    bias = (_by_head(keys).float() @ attention.q_proj.bias.float().view(_HEADS, -1, 1)).squeeze(-1)  # [n, 8, T]
    return Update(
        keys=_slots(keys, attention.q_proj.weight),
        bias=F.pad(bias, (0, _TOKENS - bias.shape[-1]), value=-math.inf).flatten(1),
        values=_slots(values, attention.out_proj.weight.T),
        value_bias=attention.out_proj.bias.float(),
        norm_weight=layer.norm4.weight.float(),
        norm_bias=layer.norm4.bias.float(),
        eps=layer.norm4.eps,
    )


def _queries(attention: Attention, placed: Tensor) -> Tensor:
    """The slots of tokens that read the image. The keys' bias adds the same to a token's score at every cell."""
    return _slots(attention.q_proj(placed) * _unit(attention), attention.k_proj.weight)


def _unit(attention: Attention) -> float:
    """What makes scores of products, in units of log 2."""
    return _LOG2E / math.sqrt(attention.q_proj.out_features // _HEADS)


def _project(attention: Attention, attended: Tensor, tokens: Tensor) -> Tensor:
    """What tokens [B, P, T, D] get for the cells [n, 64, D] that their slots have read."""
    count = tokens.shape[2]
    cells = attended.unflatten(1, (_HEADS, -1))[:, :, :count]  # [n, 8, T, D]
    values = cells @ attention.v_proj.weight.unflatten(0, (_HEADS, -1)).transpose(1, 2)
    mixed = values.transpose(1, 2).flatten(2) + attention.v_proj.bias
    return attention.out_proj(mixed).view_as(tokens)


def _by_head(x: Tensor) -> Tensor:
    """Tokens [B, P, T, inner] → [n, 8, T, inner/8]."""
    return x.flatten(0, 1).unflatten(-1, (_HEADS, -1)).transpose(1, 2)


def _slots(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens [B, P, T, inner] through each head's rows of `weight` [inner, D]: [n, 64, D]."""
    slots = _by_head(x) @ weight.unflatten(0, (_HEADS, -1))
    return F.pad(slots, (0, 0, 0, _TOKENS - slots.shape[2])).flatten(1, 2)


# ---- which masks are kept --------------------------------------------------------------------------------------------


def candidates(parts: Sequence[Candidates]) -> Candidates:
    """Those of several batches of points together."""
    return Candidates(
        torch.cat([part.words for part in parts], dim=1),
        torch.cat([part.counts for part in parts], dim=1),
        torch.cat([part.quality for part in parts], dim=1),
    )


def good_first(found: Candidates, extent: Tensor, settings: PointOptions) -> tuple[Tensor, Tensor]:
    """The numbers [B, R] of each image's candidates, those that pass all filters first and of them the best, and how
    many pass [B]."""
    above, tight, loose = found.counts.unbind(-1)
    area = above / extent.prod(1)[:, None]
    good = (found.quality >= settings.quality) & (tight / loose.clamp(min=1) >= settings.stability)
    good &= (area >= settings.smallest) & (area <= settings.largest)
    order = torch.where(good, found.quality, -math.inf).argsort(dim=1, descending=True, stable=True)
    return order, good.sum(1, dtype=torch.int32)


def select(
    found: Candidates, order: Tensor, counts: Tensor, extent: Tensor, columns: int, settings: PointOptions
) -> tuple[Tensor, Tensor]:
    """Bits [B, most, G²/8] of each image's masks that are no better one again, and how many they are [B]."""
    from powerclip.annotate.segmenters.sam_kernels import keep_distinct

    words = found.words.gather(1, order.unsqueeze(-1).expand(-1, -1, found.words.shape[-1]))
    grids = to_grids(fine_cells(words, columns), extent)  # [B, R, G, G]
    counts = counts.clamp(max=order.shape[1])
    kept = keep_distinct(mask_iou(grids) > settings.overlap, counts, settings.most)
    most = min(settings.most, order.shape[1])
    chosen = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # the kept ones in their order
    bits = grids.flatten(2).gather(1, chosen.unsqueeze(-1).expand(-1, -1, GRID * GRID)).unflatten(-1, (-1, 8))
    places = 2 ** torch.arange(7, -1, -1, device=bits.device, dtype=torch.uint8)
    return (bits * places).sum(-1, dtype=torch.uint8), kept.sum(1, dtype=torch.int32)


def fine_cells(words: Tensor, columns: int) -> Tensor:
    """Masks [B, R, 4·rows, 4·columns] of words [B, R, S]."""
    shifts = torch.arange(16, device=words.device, dtype=torch.int16)
    bits = (words.unsqueeze(-1) >> shifts) & 1  # arithmetic shift: the lowest bit is the right one all the same
    split = bits.to(torch.bool).unflatten(-1, (2, 2, 2, 2)).unflatten(2, (-1, columns))  # rows, columns, y, x, y, x
    return split.permute(0, 1, 2, 4, 6, 3, 5, 7).flatten(5).flatten(2, 4)


def to_grids(masks: Tensor, extent: Tensor) -> Tensor:
    """Masks [B, R, h, w] on the sidecars' grid; of each only the rows and columns of its image [B, 2] count.

    As `points.to_grid` does it one image at a time.
    """
    down, across = (_strips(extent[:, at], size, masks.device) for at, size in enumerate(masks.shape[-2:]))
    half = torch.float16 if masks.is_cuda else torch.float32
    # Counts of fine cells, whole numbers below 2,048 in half precision.
    counts = down.to(half).unsqueeze(1) @ masks.to(half) @ across.to(half).transpose(1, 2).unsqueeze(1)
    cover = counts.float() / (down.sum(-1)[:, None, :, None] * across.sum(-1)[:, None, None, :])
    return cover >= cover.amax((-2, -1), keepdim=True).clamp(max=0.5, min=1e-6)


def _strips(sizes: Tensor, most: int, device: torch.device) -> Tensor:
    """Which of `most` rows each of the grid's cells averages [B, G, most], for images of `sizes` rows."""
    cells = torch.arange(GRID, device=device)
    starts = cells * sizes[:, None] // GRID
    ends = ((cells + 1) * sizes[:, None] + GRID - 1) // GRID
    rows = torch.arange(most, device=device)
    return ((rows >= starts.unsqueeze(-1)) & (rows < ends.unsqueeze(-1))).float()


class FastPoints:
    """Everything in images from a grid of points.

    Args:
        decoder: draws points.
        prompt: points [B, P, (x, y)] from 0 to 1 of the model's square as tokens [B, P, 2, D].
        settings: which masks are kept.
        at_once: points that are drawn together: each takes 4 MB.
    """

    def __init__(self, decoder: FastDecoder, prompt: PointEncoder, settings: PointOptions, at_once: int = 1024):
        self.decoder, self.prompt, self.settings, self.at_once = decoder, prompt, settings, at_once

    def submit(self, encoded: Encoded, extent: Tensor) -> Callable[[], list[Masks]]:
        """Start on images that fill the shares [B, (x, y)] of the model's square; what is returned waits for masks."""
        count, device = len(encoded.image), encoded.image.device
        rows = 4 * (encoded.image.shape[1] // encoded.columns)
        cells = torch.stack(extent_cells(extent, (rows, 4 * encoded.columns)), dim=1).int()
        step = max(1, self.at_once // count)
        parts = []
        for points in point_grid(self.settings.points).to(device).split(step):
            prompts = self.prompt(points * extent[:, None])
            parts.append(self.decoder.decode(encoded, prompts, cells, self.settings.quality))
        found = candidates(parts)
        order, counts = good_first(found, cells, self.settings)
        bits, kept = select(found, order[:, :_CANDIDATES], counts, cells, encoded.columns, self.settings)
        fetched = [_to_host(tensor) for tensor in (counts, bits, kept)]
        done = torch.cuda.Event() if device.type == "cuda" else None
        if done:
            done.record()

        def collect() -> list[Masks]:
            if done:
                done.synchronize()
            most, bits, kept = int(fetched[0].max()), *fetched[1:]
            if most > _CANDIDATES:
                bits, kept = select(found, order[:, :most], counts, cells, encoded.columns, self.settings)
            masks = np.unpackbits(bits.cpu().numpy(), axis=-1).reshape(count, -1, GRID, GRID).view(np.bool_)
            return [of_image[:number] for of_image, number in zip(masks, kept.tolist(), strict=True)]

        return collect


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, which may still be under way."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
