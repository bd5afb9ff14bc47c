"""The settings of the alignment loss: the paper's, the ones that trained best, Table 6's ablations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from powerclip.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    validate,
)

Preset = Literal["default", "paper"]
Centre = Literal["none", "batch", "image"]
Backend = Literal["reference", "torch", "triton"]

PRESETS: dict[Preset, dict[str, Any]] = {
    # The best that we measured from scratch at small scale: see docs/learning.md.
    "default": {},
    # The combination that the paper prints: Definitions 1 and 2, Eq. 8 and Appendix F.
    "paper": {
        "similarity": "sum",
        "centre": "none",
        "empty_set": True,
        "largest_set": 0,
        "negatives": "hardest",
        "loss": "triplet",
        "weight": 0.1,
    },
}


@dataclass(frozen=True)
class AlignmentConfig:
    """Settings of the powerset alignment loss.

    Raises:
        ValueError: a setting is invalid; the message names it.
    """

    preset: Preset = "default"  # the settings to start from; paper: what is printed

    # How regions and phrases are compared
    aggregation: Literal["nla", "exact"] = "nla"  # exact: the maxima themselves, R2T over all 2^M sets
    # mean: p_B over its leaves, both aggregations over M; cosine: of a set's sum with p_B, for aggregation exact
    similarity: Literal["sum", "mean", "cosine"] = "mean"
    centre: Centre = "batch"  # which mean is subtracted from the patch features before pooling
    empty_set: bool = False  # whether the empty set is one of the 2^M sets of regions
    largest_set: NonNegativeInt = 1  # most regions in a phrase's best set (T2R); 0: any number, as printed
    tau: PositiveFloat = 0.001  # τ, the temperature of both aggregators
    alpha: Share = 0.75  # α of NLA-T2: 0 is the mean over all sets, 1 their soft maximum
    t1: Literal["softplus", "relu", "gelu", "swish"] = "softplus"  # the activation of NLA-T1; relu is exact
    t2: Literal["tanh", "sigmoid", "softsign"] = "tanh"  # the activation of NLA-T2

    # How pairs are contrasted
    loss: Literal["triplet", "softmax"] = "softmax"  # triplet: a hinge with margin gamma, as printed
    # semi_hard: the hardest that scores below the matched pair; the hardest of all where there is none
    negatives: Literal["hardest", "semi_hard", "k", "all"] = "all"
    k: PositiveInt = 32  # how many negatives, when negatives is k
    anneal: bool = False  # k falls over the run instead, by the same factor each step, from all negatives to 1
    gamma: NonNegativeFloat = 0.2  # γ, the margin of the triplet loss
    scale: PositiveFloat = 14.3  # the softmax's scale at the start (1/0.07, as CLIP's); learned
    weight: NonNegativeFloat = 1.0  # λ, the weight beside the CLIP loss
    ramp: Share = 0.0  # share of the run over which the weight rises from 0; 0: full weight from the first step

    # Mosaics: phrases that must find their own image's tile among those of other images
    mosaics: Share = 0.0  # share of a batch's images that are also shown as tiles of 2 × 2 mosaics; 0: none
    mosaic_weight: NonNegativeFloat = 1.0  # weight of that loss beside the CLIP loss
    mosaic_pool: Literal["mean", "patches"] = "mean"  # what answers for a tile: its embedding, or the best patches
    mosaic_among: Literal["all", "own"] = "all"  # the tiles that compete: of all mosaics, or of the image's own
    mosaic_range: Share = 0.5  # share of the sides over which the cuts between tiles vary; 0: always in the middle
    mosaic_sets: NonNegativeFloat = 0.0  # weight of gold sets: the captions of several tiles have these as best set
    # further texts whose phrases look for their tile. mixed: captions with phrases of other tiles' captions in them;
    # alone: single phrases, by their global embedding; both: half of each
    mosaic_texts: Literal["none", "mixed", "alone", "both"] = "none"
    mosaic_texts_weight: NonNegativeFloat = 1.0  # weight of their loss
    mosaic_exchange: Share = 0.5  # share of the phrases of a mixed caption that are exchanged

    # Whose features are aligned, and which of them learn from it
    trains: Literal["both", "image", "text"] = "both"  # the towers that the alignment's gradient goes to
    projection: Literal["shared", "separate"] = "shared"  # separate: patches and words have matrices of their own

    # Table 6: what happens without …
    region_sets: bool = True  # false: single regions instead of sets
    parse_trees: bool = True  # false: single tokens instead of trees
    r2t: bool = True  # regions to text: each set's best phrase
    t2r: bool = True  # text to regions: each phrase's best set

    # How the loss is computed
    gradient: Literal["select", "autograd"] = "select"  # select: differentiate only the pairs that carry a gradient
    backend: Literal["auto", Backend] = "auto"  # which implementation scores the pairs; auto: by device and settings

    @classmethod
    def named(cls, preset: Preset = "default", **overrides: Any) -> AlignmentConfig:
        """The settings of a preset, `default` or `paper`, with some of them changed."""
        return cls(**{"preset": preset, **PRESETS.get(preset, {}), **overrides})  # an unknown one is refused below

    @property
    def divides_by_lengths(self) -> bool:
        """Whether similarities of sets are divided by the sets' lengths. Single regions have length 1."""
        return self.similarity == "cosine" and self.region_sets

    def __post_init__(self) -> None:
        validate(self, "alignment")
        if self.anneal and self.negatives != "k":
            raise ValueError(f"alignment.anneal needs negatives: k, which is what it lowers, not {self.negatives}")
        if not (self.r2t or self.t2r):
            raise ValueError("alignment.r2t and alignment.t2r are both off: nothing is left to align")
        if not self.mosaics and (self.mosaic_sets or self.mosaic_texts != "none"):
            given = "mosaic_sets" if self.mosaic_sets else "mosaic_texts"
            raise ValueError(
                f"alignment.{given} is about mosaics: set alignment.mosaics to the share of images in them"
            )
        if self.mosaics and not self.parse_trees:
            raise ValueError("alignment.mosaics is for phrases, and alignment.parse_trees: false has none")
        if self.similarity == "cosine" and self.aggregation == "nla" and self.region_sets:
            raise ValueError("alignment.similarity: cosine has no approximation: it needs aggregation: exact, not nla")
        if self.largest_set and self.t1 not in ("softplus", "relu"):
            raise ValueError(f"alignment.t1: {self.t1} needs largest_set: 0 (a bounded best set is found exactly)")
        if not self.empty_set and self.aggregation == "nla" and self.region_sets:
            # Only these have a closed form over the non-empty sets.
            if self.t2r and self.t1 not in ("softplus", "relu"):
                raise ValueError(f"alignment.t1: {self.t1} needs empty_set: true (softplus and relu do not)")
            if self.r2t and self.t2 != "tanh":
                raise ValueError(f"alignment.t2: {self.t2} needs empty_set: true (tanh does not)")
