"""Which tokens of a caption take part in a token-wise loss.

Axes: C captions · L tokens
"""

from __future__ import annotations

import torch
from torch import Tensor


def real_tokens(tokens: Tensor, ends: bool) -> Tensor:
    """The tokens [C, L] bool that are no padding, with or without those for start and end of text.

    The end of text is the largest id of CLIP's vocabulary. It stays where a caption has nothing else.
    """
    end = tokens.argmax(dim=1, keepdim=True)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    if ends:
        return place <= end
    return ((place > 0) & (place < end)) | ((place == end) & (end <= 1))
