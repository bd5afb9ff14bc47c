"""A forward pass through open_clip's text transformer that reads captions only as long as they are.

A causal tower never looks ahead, so what follows the end of a caption changes none of its embeddings and need not be
there. A tower that does look ahead, or that pools the last position, gets its captions padded to the full length.

Axes: C pairs · L tokens · D the tower's own width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powerclip.encoders.hf_text import check_hf_text, forward_hf_text, hf_blocks, is_hf_text
from powerclip.errors import UserError


def text_tower(clip: Any) -> Any:
    """The module that holds the text tower's parts: `CLIP` carries them itself, `CustomTextCLIP` in `.text`."""
    return clip.text if hasattr(clip, "text") else clip


def check_text_tower(clip: Any, embed_dim: int) -> None:
    """Raise `UserError` when the text tower has no words that live in the space of its global embedding [embed_dim]."""
    from open_clip import CLIP
    from open_clip.transformer import TextTransformer

    tower = text_tower(clip)
    if is_hf_text(tower):
        check_hf_text(tower)
        return
    if not isinstance(tower, CLIP | TextTransformer):
        raise UserError(f"the text tower is a {type(tower).__name__}, whose words have no embeddings here")
    if _pool_type(tower) == "none":
        raise UserError(
            "the text tower has pool_type 'none' and so no global embedding (choose 'argmax', 'eos', 'first' or 'last')"
        )
    if tower.positional_embedding.shape[0] > tower.context_length and isinstance(tower, CLIP):
        raise UserError("text_cfg.embed_cls needs custom_text: true in the model config")
    width = tower.positional_embedding.shape[1]
    if tower.text_projection is None and width != embed_dim:
        raise UserError(
            f"the text tower has no projection and width {width}, the image tower gives {embed_dim}: "
            "give the text tower a projection or the same width"
        )


def text_projection(clip: Any) -> Any:
    """What maps the tokens that `forward_text` gives to the joint space; None where they are in it already."""
    return getattr(text_tower(clip), "text_projection", None)


def text_blocks(clip: Any) -> list[nn.Module]:
    """The tower's transformer blocks, the first one first."""
    tower = text_tower(clip)
    return hf_blocks(tower) if is_hf_text(tower) else list(tower.transformer.resblocks)


def reads_ahead(clip: Any) -> bool:
    """Whether a caption's embedding depends on the padding behind it."""
    tower = text_tower(clip)
    if is_hf_text(tower):
        return False  # padding is masked
    causal = tower.attn_mask is not None and getattr(tower, "cls_emb", None) is None
    return not causal or _pool_type(tower) == "last"


def trim(tokens: Tensor) -> Tensor:
    """Cut padded tokens [C, L] behind the longest caption.

    The end of text is the largest id of CLIP's vocabulary; the padding cannot mark the end, because its id 0 is also
    a real token. Waits for the device that holds `tokens`: meant for the data side, on the CPU.
    """
    if tokens.shape[0] == 0:
        return tokens
    return tokens[:, : int(tokens.argmax(dim=1).max()) + 1]


def forward_text(clip: Any, tokens: Tensor, pad_id: int = 0, *, dense: bool = True) -> tuple[Tensor, Tensor]:
    """Pooled [C, D] and words [C, L, D], both after ln_final and before the projection. Without `dense`, no words.

    Towers of Hugging Face give both after their projection.
    """
    tower = text_tower(clip)
    if is_hf_text(tower):
        return forward_hf_text(tower, tokens, dense=dense)
    length = tokens.shape[1]
    if length > tower.context_length:
        raise UserError(
            f"captions of {length} tokens, but the model reads at most {tower.context_length}: "
            "tokenize with the model's context length"
        )
    if reads_ahead(clip):
        tokens = F.pad(tokens, (0, tower.context_length - length), value=pad_id)

    x, mask = _embed(tower, tokens)
    x = tower.transformer(x, attn_mask=mask)
    if getattr(tower, "cls_emb", None) is not None:
        # An appended class token is the pooled one, whatever pool_type says.
        return tower.ln_final(x[:, -1]), tower.ln_final(x[:, : length if dense else 0])
    if not dense:
        return tower.ln_final(_pool(tower, x, tokens)), x[:, :0]
    x = tower.ln_final(x)
    return _pool(tower, x, tokens), x[:, :length]


def _embed(tower: Any, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    if getattr(tower, "cls_emb", None) is not None:
        # The class token and the mask that goes with it have a legacy form in CoCa weights: open_clip knows it.
        return tower._embeds(tokens)
    length = tokens.shape[1]
    dtype = tower.transformer.get_cast_dtype()
    x = tower.token_embedding(tokens).to(dtype) + tower.positional_embedding[:length].to(dtype)
    return x, None if tower.attn_mask is None else tower.attn_mask[:length, :length]


def _pool_type(tower: Any) -> str:
    return tower.text_pool_type if hasattr(tower, "text_pool_type") else tower.pool_type


def _pool(tower: Any, x: Tensor, tokens: Tensor) -> Tensor:
    kind = _pool_type(tower)
    if kind == "first":
        return x[:, 0]
    if kind == "last":
        return x[:, -1]
    if kind == "eos":
        end = (tokens == (tower.text_eos_id if hasattr(tower, "text_eos_id") else tower.eos_id)).int().argmax(dim=1)
    else:
        end = tokens.argmax(dim=1)
    return x[torch.arange(x.shape[0], device=x.device), end]
