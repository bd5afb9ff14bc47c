"""Two models with the same towers as one, their weights averaged.

Wortsman et al., "Robust fine-tuning of zero-shot models" (WiSE-FT), CVPR 2022: between a pretrained model and the same
model fine-tuned there is often one that has most of what was learned and has lost less of what was known.
"""

from __future__ import annotations

import torch

from powerclip.encoders.dual import DualEncoder
from powerclip.encoders.models import spelled_out
from powerclip.errors import UserError


@torch.no_grad()
def blend(first: DualEncoder, second: DualEncoder, share: float) -> DualEncoder:
    """`first`, its weights moved the given share of the way to those of `second`: 0 is the first, 1 the second.

    Raises:
        UserError: the share is not in [0, 1], or the models differ in more than their weights.
    """
    if not 0 <= share <= 1:
        raise UserError(f"the share of the second model must lie in [0, 1], not {share}")
    ours, theirs = first.clip.state_dict(), second.clip.state_dict()
    differing = [name for name in ours.keys() | theirs.keys() if _shape(ours, name) != _shape(theirs, name)]
    if differing or _towers(first) != _towers(second):
        example = (
            f"{min(differing)} is in one of them only or has another shape" if differing else "their configs differ"
        )
        raise UserError(f"the models do not have the same towers: {example}; blend a model with one trained from it")
    for name, value in ours.items():
        if value.is_floating_point():
            value.lerp_(theirs[name].to(value), share)
    # Images are prepared as the second, the fine-tuned one, had them.
    first.clip.visual.preprocess_cfg = second.clip.visual.preprocess_cfg
    return first


def _towers(model: DualEncoder) -> tuple[object, ...]:
    """What decides the values beside the weights."""
    return spelled_out(model.config), bool(model.config.get("quick_gelu", False))


def _shape(state: dict[str, torch.Tensor], name: str) -> torch.Size | None:
    return state[name].shape if name in state else None
