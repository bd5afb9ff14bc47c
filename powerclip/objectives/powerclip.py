"""PowerCLIP: CLIP's loss plus powerset alignment of image regions with caption phrases.

"PowerCLIP: Powerset Alignment for Contrastive Pre-Training", CVPR 2026.

    L = L_CLIP + λ · L_align,   L_align = Φγ(S̄) + Φγ(S̄ᵀ) as printed, or a softmax over S̄

The settings are those of `AlignmentConfig`; `preset: paper` is what the paper prints.

Axes: C pairs of the batch · N patches · L tokens · D width
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import Parts, embed_parts
from powerclip.alignment.loss import alignment_loss
from powerclip.alignment.negatives import annealed_count
from powerclip.alignment.phrases import leaf_rows, node_ranges
from powerclip.alignment.pooling import normalise
from powerclip.alignment.ragged import pad
from powerclip.encoders.features import ImageFeatures
from powerclip.objectives.base import Objective, Plan, Terms, clamp_scale, learned_scale
from powerclip.objectives.clip import clip_loss
from powerclip.objectives.mosaic_texts import draws_of_a_text, further_texts
from powerclip.objectives.mosaics import (
    TILES,
    MosaicFeatures,
    check_towers,
    competing,
    find_tile_loss,
    gather_rows,
    glue,
    holds_all_words,
    in_mosaics,
    seam_cells,
    set_loss,
    tile_logits,
    tile_masks,
)
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.data.batch import Batch, FurtherTexts
    from powerclip.encoders import DualEncoder, Features


class PowerClip(Objective):
    """CLIP's loss and the alignment loss, weighted.

    Args:
        config: the settings of the alignment; those that learn by default.

    Raises:
        ValueError: a setting is out of its range, or does not go with another.

    Examples:
        >>> import torch
        >>> from powerclip.alignment.config import AlignmentConfig
        >>> from powerclip.data.batch import Batch
        >>> from powerclip.data.tokens import CaptionTokenizer, pack_phrases
        >>> from powerclip.data.trees import parse_bracketed
        >>> from powerclip.encoders import Features
        >>> from powerclip.objectives import PowerClip
        >>> captions = ["a dog on a chair", "two cats"]
        >>> brackets = ["(NP (NP a dog) (PP on (NP a chair)))", "(NP two cats)"]
        >>> tokenizer = CaptionTokenizer()
        >>> tokenized = [tokenizer.encode(caption) for caption in captions]
        >>> tokens = tokenizer.pad([caption.ids for caption in tokenized])
        >>> trees = [parse_bracketed(text, caption) for text, caption in zip(brackets, captions)]
        >>> regions = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)  # two on a grid of 2 × 2 patches
        >>> batch = Batch(
        ...     images=torch.zeros(2, 3, 32, 32),
        ...     tokens=tokens,
        ...     regions=regions.expand(2, -1, -1),
        ...     phrases=pack_phrases(trees, tokenized, tokens.shape[1]),
        ...     keys=["dog", "cats"],
        ... )
        >>> _ = torch.manual_seed(0)
        >>> features = Features(
        ...     image=torch.eye(2, 8),
        ...     patches=torch.randn(2, 4, 8),
        ...     text=torch.eye(2, 8),
        ...     words=torch.randn(2, tokens.shape[1], 8),
        ...     logit_scale=torch.tensor(10.0),
        ... )
        >>> terms = PowerClip(AlignmentConfig(weight=0.5)).loss(features, batch)
        >>> torch.equal(terms.total, terms.parts["clip"] + 0.5 * terms.parts["alignment"])
        True
    """

    def __init__(self, config: AlignmentConfig | None = None):
        super().__init__()
        self.config = config or AlignmentConfig()
        # The triplet loss has no scale to learn.
        learned = self.config.loss == "softmax"
        self.log_scale = learned_scale(self.config.scale) if learned else None
        self.mosaic_log_scale = learned_scale(self.config.scale) if self.config.mosaics else None
        self.projections: nn.ParameterDict | None = None  # of patches and words, when they have their own
        self.done = 0.0  # `elapsed` as the host knows it: how many negatives count needs no device sync

    def attach(self, encoder: DualEncoder) -> None:
        """Make the matrices [D, D] of `projection: separate`; they start as the identity, which changes nothing.

        Raises:
            UserError: the towers cannot have mosaics, or no texts for them.
        """
        if self.config.mosaics:
            check_towers(encoder, self.config)
        if self.config.projection == "separate":
            width = encoder.embed_dim
            matrices = {side: nn.Parameter(torch.eye(width)) for side in ("patches", "words")}
            self.projections = nn.ParameterDict(matrices)

    def progress(self, step: int, steps: int) -> None:
        """Note that `step` of `steps` updates are done."""
        super().progress(step, steps)
        self.done = step / steps

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """CLIP's loss plus the weighted alignment loss."""
        clip = clip_loss(features.image, features.text, features.logit_scale, ranks)
        # Arguments reach ±1e4 at τ = 0.001: bf16 would keep three digits of them.
        with torch.autocast(features.patches.device.type, enabled=False):
            patches, words = self._aligned("patches", features.patches), self._aligned("words", features.words)
            parts = embed_parts(patches, batch.regions, words, batch.phrases, self.config, ranks)
            scale = None if self.log_scale is None else self.log_scale.exp()
            k = annealed_count(len(patches) * ranks.count, self.done) if self.config.anneal else None
            align = alignment_loss(parts, self.config, scale, ranks, k)
        logged = {
            "clip": clip,
            "alignment": align.loss,
            "violation": align.violation,
            "empty": align.empty,
            "positive": align.positive,
            "negative": align.negative,
        }
        if self.log_scale is not None:
            logged["alignment_scale"] = self.log_scale.exp()
        weight: Tensor | float = self.config.weight
        if self.config.ramp:
            weight = logged["weight"] = self.config.weight * (self.elapsed / self.config.ramp).clamp(max=1)
        if k is not None:
            logged["k"] = torch.full((), float(k), device=clip.device)
        total = clip + weight * align.loss
        if self.config.mosaics and len(features.extra.patches) > 0:  # a dry run's first batches are too small for one
            with torch.autocast(features.patches.device.type, enabled=False):
                mosaics, parts_of_it = self._mosaic_loss(features, parts, batch, ranks)
            total = total + mosaics
            logged |= parts_of_it
        return Terms(total, {name: value.detach() for name, value in logged.items()})

    def text_noise_shape(self) -> tuple[int, ...] | None:
        """Numbers for the further texts of mosaics, where there are some."""
        kind = self.config.mosaic_texts
        return draws_of_a_text(kind) if self.config.mosaics and kind != "none" else None

    def further_texts(self, batch: Batch, noise: Tensor) -> FurtherTexts | None:
        """The further texts of mosaics."""
        config = self.config
        return further_texts(batch, config.mosaics, config.mosaic_texts, config.mosaic_exchange, noise)

    def noise_shape(self, encoder: DualEncoder) -> tuple[int, ...] | None:
        """Numbers for the cuts of mosaics."""
        return (2,) if self.config.mosaics else super().noise_shape(encoder)

    def plan(self, encoder: DualEncoder, images: Tensor, noise: Tensor, ranks: Ranks = SINGLE) -> Plan:
        """Where the mosaics are cut."""
        if not self.config.mosaics:
            return super().plan(encoder, images, noise, ranks)
        (rows, columns), range_ = encoder.grid, self.config.mosaic_range
        seams = [seam_cells(noise[:, 0], rows, range_), seam_cells(noise[:, 1], columns, range_)]
        return Plan(seams=torch.stack(seams, 1))

    def encode_images(self, encoder: DualEncoder, images: Tensor, plan: Plan) -> ImageFeatures:
        """The images, and mosaics of some of them, in one pass."""
        if plan.seams is None:
            return super().encode_images(encoder, images, plan)
        grid, share = encoder.grid, self.config.mosaics
        seams = in_mosaics(plan.seams, share)[:, 0]
        with torch.autocast(images.device.type, enabled=False), torch.no_grad():
            mosaics = glue(in_mosaics(images, share), seams, grid)
        features = encoder.image_features(torch.cat([images, mosaics]))
        counts = [len(images), len(mosaics)]
        patches, of_mosaics = features.patches.split(counts)
        return ImageFeatures(
            image=features.image[: len(images)],
            patches=patches,
            extra=MosaicFeatures(of_mosaics, tile_masks(seams, grid)),
        )

    def _mosaic_loss(
        self, features: Features, parts: Parts, batch: Batch, ranks: Ranks
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted losses on mosaics, and what is logged of them."""
        config, mosaics = self.config, features.extra
        assert isinstance(mosaics, MosaicFeatures)
        assert self.mosaic_log_scale is not None
        mosaics = replace(mosaics, patches=self._aligned("patches", mosaics.patches))
        scale, device = self.mosaic_log_scale.exp(), mosaics.patches.device

        def select(values: Tensor) -> Tensor:
            return in_mosaics(values, config.mosaics).flatten(0, 1)

        first = TILES * len(mosaics.patches) * ranks.rank
        nodes, real = (
            select(pad(parts.nodes, parts.segments, 0.0)),
            select(torch.arange(parts.segments.longest, device=device) < parts.segments.lengths.unsqueeze(1)),
        )
        logits, tiles = tile_logits(mosaics, nodes, config, scale, ranks)
        logits = competing(logits, first, config.mosaic_among)
        captions, caption_words = gather_rows(select(batch.tokens), select(batch.phrases.words), ranks)
        start, end = (select(edge) for edge in node_ranges(batch.phrases))
        also = holds_all_words(select(batch.tokens), select(batch.phrases.words), start, end, captions, caption_words)
        own = torch.arange(len(nodes), device=device)[:, None].expand(real.shape) + first
        find, found = find_tile_loss(logits, own, real, also)
        total = config.mosaic_weight * find
        logged = {"mosaic": find, "mosaic_found": found, "mosaic_scale": scale}
        if config.mosaic_sets:
            of_captions = normalise((nodes * real.unsqueeze(-1)).sum(1)).unflatten(0, (-1, TILES))
            sets, best = set_loss(tiles, of_captions, scale)
            total = total + config.mosaic_sets * sets
            logged |= {"mosaic_sets": sets, "mosaic_sets_found": best}
        if batch.further is not None:
            texts = batch.further
            assert features.further_words is not None
            assert features.further_text is not None
            queries, asked = [], []
            if config.mosaic_texts != "alone":
                further = self._aligned("words", features.further_words)
                queries.append(leaf_rows(further, texts.phrases, centred=config.centre != "none", ranks=ranks))
                asked.append(texts.asked)
            if config.mosaic_texts != "mixed":
                whole = self._aligned("words", features.further_text).float()
                if config.centre != "none":
                    # The mean of those that count: the others are of another kind.
                    summed = ranks.sum(torch.where(texts.alone.unsqueeze(1), whole, 0.0).sum(0))
                    whole = normalise(whole - summed / ranks.sum(texts.alone.sum()).clamp(min=1))
                queries.append(whole.unsqueeze(1))
                asked.append(texts.alone.unsqueeze(1))
            logits = tile_logits(mosaics, torch.cat(queries, 1), config, scale, ranks)[0]
            logits = competing(logits, first, config.mosaic_among)
            start, end = texts.phrases.leaf_start.view_as(texts.tile), texts.phrases.leaf_end.view_as(texts.tile)
            also = holds_all_words(texts.tokens, texts.phrases.words, start, end, captions, caption_words)
            own = texts.tile + first
            if config.mosaic_texts == "both":  # a text as a whole is its only leaf
                also, own = torch.cat([also, also[:, :1]], 1), torch.cat([own, own[:, :1]], 1)
            find, found = find_tile_loss(logits, own, torch.cat(asked, 1), also)
            total = total + config.mosaic_texts_weight * find
            logged |= {"mosaic_texts": find, "mosaic_texts_found": found}
        return total, logged

    def _aligned(self, side: Literal["patches", "words"], features: Tensor) -> Tensor:
        """Patches or words […, D] as the alignment sees them: who learns from it, and in which space."""
        if self.config.trains == {"patches": "text", "words": "image"}[side]:
            features = features.detach()
        if self.config.projection == "separate":
            if self.projections is None:
                raise ValueError("alignment.projection: separate needs attach(encoder), which makes the matrices")
            features = features.float() @ self.projections[side]
        return features

    def clamp(self) -> None:
        """Keep the softmax's scale at 100 or below, as CLIP keeps its own."""
        for scale in (self.log_scale, self.mosaic_log_scale):
            if scale is not None:
                clamp_scale(scale)
