"""Text-to-patch similarity: where in the image a caption or one of its phrases is found.

A phrase can ask in two ways. `words`: as in training, by p_B (Eqs. 3 and 4), pooled from the word features that
the whole caption gave. `text`: as a caption of its own, by its global embedding.

Axes: C captions · N patches · D width · T phrases of all captions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from powerclip.alignment.phrases import embed_leaves, embed_nodes
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.data.trees import Tree

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder


def patch_similarity(patches: Tensor, query: Tensor) -> Tensor:
    """Cosine of every patch [..., N, D] with a query [..., D]: [..., N]."""
    return (normalize(patches.float(), dim=-1) @ normalize(query.float(), dim=-1).unsqueeze(-1)).squeeze(-1)


def text_queries(encoder: DualEncoder, tokenizer: CaptionTokenizer, texts: Sequence[str]) -> Tensor:
    """Global embeddings [C, D] of texts, each a caption of its own."""
    tokens = tokenizer.pad([tokenizer.encode(text).ids for text in texts])
    return encoder.encode_text(tokens.to(_device(encoder)))


def word_queries(
    encoder: DualEncoder, tokenizer: CaptionTokenizer, captions: Sequence[str], trees: Sequence[Tree]
) -> Tensor:
    """p_B of every node of every tree [T, D], end to end in the order of `trees` and of their nodes.

    A node that lies beyond the context length cannot be told from its caption, and gets the caption's p_B.
    """
    device = _device(encoder)
    tokenized = [tokenizer.encode(caption) for caption in captions]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    _, words = encoder.encode_words(tokens.to(device))
    # A row for each node instead of each caption: packing merges nodes that the context length made equal.
    owners = [caption for caption, tree in enumerate(trees) for _ in tree.nodes]
    single = [Tree(tree.leaves, (node,)) for tree in trees for node in tree.nodes]
    phrases = pack_phrases(single, [tokenized[owner] for owner in owners], tokens.shape[1]).to(device)
    return embed_nodes(embed_leaves(words[torch.tensor(owners, device=device)], phrases), phrases)


def _device(encoder: DualEncoder) -> torch.device:
    return next(encoder.parameters()).device
