"""Every choice of the alignment loss: what the paper prints, what we found to learn, Table 6's ablations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

PRESETS: dict[str, dict[str, Any]] = {
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
    """Settings of the powerset alignment loss. Raises `ValueError`, naming the setting, for what cannot be."""

    preset: str = "default"

    # How regions and phrases are compared
    aggregation: Literal["nla", "exact"] = "nla"
    similarity: Literal["sum", "mean"] = "mean"  # mean: p_B over its leaves, both aggregations over M
    centre: Literal["none", "batch", "image"] = (
        "batch"  # which mean is subtracted from the patch features before pooling
    )
    empty_set: bool = False  # whether A may be ∅ in 2^M
    largest_set: int = 1  # most regions in a phrase's best set (T2R); 0: any number, as printed
    tau: float = 0.001
    alpha: float = 0.75
    t1: Literal["softplus", "relu", "gelu", "swish"] = "softplus"
    t2: Literal["tanh", "sigmoid", "softsign"] = "tanh"

    # How pairs are contrasted
    loss: Literal["triplet", "softmax"] = "softmax"
    # semi_hard: the hardest that scores below the matched pair; the hardest of all where there is none
    negatives: Literal["hardest", "semi_hard", "k", "all"] = "all"
    k: int = 32  # how many, when negatives is "k"
    anneal: bool = False  # k falls over the run instead, by the same factor each step, from all negatives to 1
    gamma: float = 0.2  # margin of the triplet loss
    scale: float = 14.3  # the softmax's scale at the start (1/0.07, as CLIP's); learned
    weight: float = 1.0  # λ, the weight beside the CLIP loss
    ramp: float = 0.0  # share of the run over which the weight rises from 0; 0: it is there from the first step

    # Whose features are aligned, and which of them learn from it
    trains: Literal["both", "image", "text"] = "both"  # the towers that the alignment's gradient goes to
    projection: Literal["shared", "separate"] = "shared"  # separate: patches and words have matrices of their own

    # Table 6: what happens without …
    region_sets: bool = True  # false: single regions instead of sets
    parse_trees: bool = True  # false: single tokens instead of trees
    r2t: bool = True
    t2r: bool = True

    # How the loss is computed: differentiate only the pairs that carry a gradient, or all of them
    gradient: Literal["select", "autograd"] = "select"
    backend: Literal["auto", "reference", "torch", "triton"] = "auto"  # see backends.py

    @classmethod
    def named(cls, preset: str = "default", **overrides: Any) -> AlignmentConfig:
        """The settings of a preset, `default` or `paper`, with some of them changed."""
        if preset not in PRESETS:
            raise ValueError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
        return cls(**{"preset": preset, **PRESETS[preset], **overrides})

    def __post_init__(self) -> None:
        choices = {
            "preset": tuple(PRESETS),
            "aggregation": ("nla", "exact"),
            "similarity": ("sum", "mean"),
            "centre": ("none", "batch", "image"),
            "t1": ("softplus", "relu", "gelu", "swish"),
            "t2": ("tanh", "sigmoid", "softsign"),
            "loss": ("triplet", "softmax"),
            "negatives": ("hardest", "semi_hard", "k", "all"),
            "trains": ("both", "image", "text"),
            "projection": ("shared", "separate"),
            "gradient": ("select", "autograd"),
            "backend": ("auto", "reference", "torch", "triton"),
        }
        for field in fields(self):
            value, allowed = getattr(self, field.name), choices.get(field.name)
            if allowed and value not in allowed:
                raise ValueError(f"alignment.{field.name}: {value!r} is not one of {', '.join(allowed)}")
        for name in ("alpha", "ramp"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"alignment.{name} must lie in [0, 1], not {getattr(self, name)}")
        for name in ("tau", "scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"alignment.{name} must be positive and finite, not {getattr(self, name)}")
        for name in ("gamma", "weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"alignment.{name} must be finite and not negative, not {getattr(self, name)}")
        if self.k < 1:
            raise ValueError(f"alignment.k must be at least 1, not {self.k}")
        if self.anneal and self.negatives != "k":
            raise ValueError(f"alignment.anneal needs negatives: k, which is what it lowers, not {self.negatives}")
        if self.largest_set < 0:
            raise ValueError(f"alignment.largest_set must not be negative, not {self.largest_set}")
        if not (self.r2t or self.t2r):
            raise ValueError("alignment.r2t and alignment.t2r are both off: nothing is left to align")
        if self.largest_set and self.t1 not in ("softplus", "relu"):
            raise ValueError(f"alignment.t1: {self.t1} needs largest_set: 0 (a bounded best set is found exactly)")
        if not self.empty_set and self.aggregation == "nla" and self.region_sets:
            # Only these have a closed form over the non-empty sets.
            if self.t2r and self.t1 not in ("softplus", "relu"):
                raise ValueError(f"alignment.t1: {self.t1} needs empty_set: true (softplus and relu do not)")
            if self.r2t and self.t2 != "tanh":
                raise ValueError(f"alignment.t2: {self.t2} needs empty_set: true (tanh does not)")
