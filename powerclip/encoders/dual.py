"""The dual encoder: an open_clip model whose one forward pass gives global and dense features.

Axes: C pairs · N patches · L tokens · D width
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powerclip.encoders.features import Features, ImageFeatures
from powerclip.encoders.hf_text import DEFAULT_CONTEXT_LENGTH, is_hf_text
from powerclip.encoders.selector import PatchSelector
from powerclip.encoders.text import check_text_tower, forward_text, text_projection, text_tower
from powerclip.encoders.vision import (
    check_vision_tower,
    dropout_selector,
    forward_image,
    forward_tokens,
    grid_of,
    image_grid,
    image_projection,
)

MAX_LOGIT_SCALE = math.log(100)  # as in CLIP: a larger scale makes training unstable


class DualEncoder(nn.Module):
    """An image tower and a text tower of open_clip, with their patches and words.

    Args:
        clip: open_clip's `CLIP` or `CustomTextCLIP` with transformer towers; stays reachable as `.clip`.
        config: its open_clip model config, kept for saving.

    Raises:
        UserError: the towers have no dense features in the space of their global embeddings.
    """

    def __init__(self, clip: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        check_vision_tower(clip.visual)
        check_text_tower(clip, config["embed_dim"])
        # nn.Module's attributes are typed Tensor | Module; open_clip's towers carry more than that.
        self.clip: Any = clip
        self.config = copy.deepcopy(config)
        self.directory: Path | None = None  # the folder that it was read from, which may hold its tokenizer
        self.pad_id: int = self.config["text_cfg"].get("pad_id", 0)  # `tokenizer_for` sets its tokenizer's
        self.blocks_before = 0  # blocks of the image tower that images given as tokens have passed

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches; patch (r, c) has index r · columns + c."""
        return image_grid(self.clip.visual)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width, in pixels, of the images the model reads."""
        height, width = self.clip.visual.image_size
        return height, width

    @property
    def preprocess(self) -> dict[str, Any]:
        """open_clip's preprocess_cfg, as it is saved: the size follows from the towers."""
        return {name: value for name, value in self.clip.visual.preprocess_cfg.items() if name != "size"}

    @property
    def context_length(self) -> int:
        """Most tokens of a caption, start and end of text included."""
        if is_hf_text(text_tower(self.clip)):  # its own limit is that of its positions
            return self.config["text_cfg"].get("context_length", DEFAULT_CONTEXT_LENGTH)
        return self.clip.context_length

    @property
    def embed_dim(self) -> int:
        """The width D that both towers share."""
        return self.config["embed_dim"]

    def forward(
        self,
        images: Tensor,
        tokens: Tensor | tuple[Tensor, ...],
        selector: PatchSelector | None = None,
        *,
        dense: bool = True,
    ) -> Features:
        """All features of images [C, 3, H, W] and tokens [C, L], L at most `context_length`.

        Tokens in several groups of rows, each with its own L, give the features of one group padded to the longest.
        Without `dense` there are no patches and no words, and what only they need is not computed.
        Without a selector, a model configured with patch dropout drops patches at random while it trains.
        """
        of_images = self.image_features(images, selector, dense=dense)
        return self.join_features(of_images, *self.encode_words(tokens, dense=dense))

    def image_features(
        self, images: Tensor, selector: PatchSelector | None = None, *, dense: bool = True
    ) -> ImageFeatures:
        """The image tower's part of `forward`.

        Images may come as tokens [C, 1+N, D] that the first `blocks_before` blocks have left, see `tokens_after`.
        """
        if selector is None and self.training:
            selector = dropout_selector(self.clip.visual)
        if images.dim() == 3:
            pooled, patches = forward_tokens(self.clip.visual, images, self.blocks_before, dense=dense)
            selection = None
        else:
            pooled, patches, selection = forward_image(self.clip.visual, images, selector, dense=dense)
        return ImageFeatures(
            image=self._image_embedding(pooled),
            patches=project(patches, image_projection(self.clip.visual)),
            kept=None if selection is None else selection.kept,
            shown=None if selection is None else selection.shown,
        )

    def join_features(self, of_images: ImageFeatures, text: Tensor, words: Tensor) -> Features:
        """The features of a batch from what each tower gave, with the scale and the bias of the logits."""
        bias = self.clip.logit_bias
        return Features(  # field by field: torch 2.11 cannot compile **vars(of_images)
            image=of_images.image,
            patches=of_images.patches,
            kept=of_images.kept,
            shown=of_images.shown,
            extra=of_images.extra,
            text=text,
            words=words,
            logit_scale=self.clip.logit_scale.exp().reshape(()),
            logit_bias=None if bias is None else bias.reshape(()),
        )

    def encode_image(self, images: Tensor) -> Tensor:
        """Normalised global embeddings [C, D] of whole images."""
        return self._image_embedding(forward_image(self.clip.visual, images)[0])

    def encode_patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised global embeddings [C, D] and all patches [C, N, D] of whole images."""
        pooled, patches, _ = forward_image(self.clip.visual, images)
        return self._image_embedding(pooled), project(patches, image_projection(self.clip.visual))

    def encode_maps(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [C, 3, H, W] of any size in whole patches: what detection reads.

        Returns:
            Normalised global embeddings [C, D]; the patches as the tower has them [C, width, rows, columns], and
            projected into the joint space [C, D, rows, columns]. At the tower's own size they are `encode_patches`'.
        """
        pooled, patches, _ = forward_image(self.clip.visual, images, any_size=True)
        projected = project(patches, image_projection(self.clip.visual))
        grid = grid_of(self.clip.visual, images)
        own, joint = (one.transpose(1, 2).unflatten(2, grid) for one in (patches, projected))
        return self._image_embedding(pooled), own, joint

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Normalised global embeddings [C, D] of captions."""
        return self._text_embedding(forward_text(self.clip, tokens, self.pad_id)[0])

    def encode_words(self, tokens: Tensor | tuple[Tensor, ...], *, dense: bool = True) -> tuple[Tensor, Tensor]:
        """Normalised global embeddings [C, D] and words [C, L, D] of captions, in one group or in several."""
        if isinstance(tokens, tuple):
            return join_groups([self.encode_words(group, dense=dense) for group in tokens])
        pooled, words = forward_text(self.clip, tokens, self.pad_id, dense=dense)
        return self._text_embedding(pooled), project(words, text_projection(self.clip))

    @torch.no_grad()
    def clamp_logit_scale(self) -> None:
        """Keep the logit scale in [1, 100]: call it after each optimizer step."""
        self.clip.logit_scale.clamp_(0, MAX_LOGIT_SCALE)

    # The global embedding is projected on its own: a row of the projected tokens would differ from open_clip's result
    # in the last bits, because a matrix product of another shape sums in another order.
    def _image_embedding(self, pooled: Tensor) -> Tensor:
        return F.normalize(project(pooled, image_projection(self.clip.visual)), dim=-1)

    def _text_embedding(self, pooled: Tensor) -> Tensor:
        return F.normalize(project(pooled, text_projection(self.clip)), dim=-1)


def join_groups(groups: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Embeddings [C, D] and words [C, L, D] of several groups of captions as those of one, padded to the longest L."""
    if len(groups) == 1:
        return groups[0]
    longest = max(words.shape[1] for _, words in groups)
    padded = [F.pad(words, (0, 0, 0, longest - words.shape[1])) for _, words in groups]
    return torch.cat([text for text, _ in groups]), torch.cat(padded)


def project(features: Tensor, projection: nn.Linear | Tensor | None) -> Tensor:
    """Map features [..., width] to the shared space; open_clip keeps a matrix, a linear layer or nothing."""
    if projection is None:
        return features
    if isinstance(projection, nn.Linear):
        return projection(features)
    return features @ projection
