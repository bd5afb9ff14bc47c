"""Hugging Face's text encoders as text towers, through open_clip's `HFTextEncoder`: RoBERTa, XLM-R, mT5, NLLB, …

A word's embedding is what the pooling gives for that token alone: with the mean or the first token the token itself,
with a pooling layer of the model (`cls_pooler` where there is one) what that layer gives for it; then the projection.

Axes: C captions · L tokens · D width of the joint space
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from powerclip.errors import UserError

DEFAULT_CONTEXT_LENGTH = 77  # as open_clip's tokenizers have it where a config does not say


def is_hf_text(tower: Any) -> bool:
    """Whether a text tower is open_clip's wrapper around a model of Hugging Face."""
    return hasattr(tower, "pooler") and hasattr(tower, "transformer") and not hasattr(tower, "token_embedding")


def check_hf_text(tower: Any) -> None:
    """Raise `UserError` when the tower's tokens have no place in the space of its global embedding."""
    kind = type(tower.pooler).__name__
    if kind not in ("MeanPooler", "ClsPooler", "ClsLastHiddenStatePooler"):
        raise UserError(
            f"the text tower pools by {kind}: choose hf_pooler_type mean_pooler, cls_pooler or "
            "cls_last_hidden_state_pooler"
        )


def forward_hf_text(tower: Any, tokens: Tensor, *, dense: bool = True) -> tuple[Tensor, Tensor]:
    """The global embedding [C, D] and the words [C, L, D], both in the joint space. Without `dense`, no words.

    Padding is masked, so captions may be cut behind the longest.
    """
    mask = (tokens != tower.config.pad_token_id).long()
    out = tower.transformer(input_ids=tokens, attention_mask=mask)
    embedding = tower.proj(tower.pooler(out, mask))
    states = out.last_hidden_state
    if not dense:
        return embedding, embedding.new_zeros(len(tokens), 0, embedding.shape[-1])
    layer = getattr(tower.transformer, "pooler", None)
    if type(tower.pooler).__name__ == "ClsPooler" and getattr(out, "pooler_output", None) is not None and layer:
        states = layer(states.flatten(0, 1).unsqueeze(1)).unflatten(0, states.shape[:2])
    return embedding, tower.proj(states)


def hf_blocks(tower: Any) -> list[nn.Module]:
    """The tower's transformer blocks: its longest list of layers."""
    lists = [list(module) for module in tower.transformer.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
