"""SAM's prompt encoder and mask decoder, for prompts that are one point each: three masks for every point.

Kirillov et al. 2023 (Segment Anything), §A: tokens and image features attend to each other in both directions. Modules
bear the names of the official weights file, so that it loads as it is. The image's side of the first layer is the same
for all points of an image and is computed once.

Axes: B images · P points · K tokens · S cells of the image grid · D width
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powerclip.annotate.segmenters.points import Drawn
from powerclip.annotate.segmenters.tiny_vit import FEATURES, LayerNorm2d

MASKS = 3  # for one point: a whole, a part, a part of a part


class Attention(nn.Module):
    """Attention with 8 heads, in a narrower space between tokens and image."""

    def __init__(self, inner: int):
        super().__init__()
        self.q_proj = nn.Linear(FEATURES, inner)
        self.k_proj = nn.Linear(FEATURES, inner)
        self.v_proj = nn.Linear(FEATURES, inner)
        self.out_proj = nn.Linear(inner, FEATURES)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, P, …, D] each; one that is the same for all points may have 1 in place of P, and is projected once."""
        count, points = query.shape[0], max(query.shape[1], key.shape[1])

        def heads(x: Tensor) -> Tensor:  # [B·P, 8, cells, inner/8]
            split = x.unflatten(-1, (8, -1)).transpose(2, 3)
            return split.expand(-1, points, -1, -1, -1).flatten(0, 1)

        mixed = F.scaled_dot_product_attention(
            heads(self.q_proj(query)), heads(self.k_proj(key)), heads(self.v_proj(value))
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2).unflatten(0, (count, points)))


class TokenMlp(nn.Module):
    """Two layers on the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1 = nn.Linear(FEATURES, 2048)
        self.lin2 = nn.Linear(2048, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → the same shape."""
        return self.lin2(F.relu(self.lin1(x)))


class TwoWayLayer(nn.Module):
    """Tokens attend to each other and to the image, then the image to the tokens."""

    def __init__(self, first: bool):
        super().__init__()
        self.first = first
        self.self_attn = Attention(FEATURES)
        self.norm1 = nn.LayerNorm(FEATURES)
        self.cross_attn_token_to_image = Attention(FEATURES // 2)
        self.norm2 = nn.LayerNorm(FEATURES)
        self.mlp = TokenMlp()
        self.norm3 = nn.LayerNorm(FEATURES)
        self.norm4 = nn.LayerNorm(FEATURES)
        self.cross_attn_image_to_token = Attention(FEATURES // 2)

    def forward(self, tokens: Tensor, image: Tensor, prompts: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, P, K, D] and image [B, 1 or P, S, D], each with its positions, to both updated."""
        if self.first:  # the tokens still are the prompts
            tokens = self.norm1(self.self_attn(tokens, tokens, tokens))
        else:
            placed = tokens + prompts
            tokens = self.norm1(tokens + self.self_attn(placed, placed, tokens))
        tokens = self.norm2(tokens + self.cross_attn_token_to_image(tokens + prompts, image + positions, image))
        tokens = self.norm3(tokens + self.mlp(tokens))
        image = self.norm4(image + self.cross_attn_image_to_token(image + positions, tokens + prompts, tokens))
        return tokens, image


class TwoWayTransformer(nn.Module):
    """Two layers, and a final attention of the tokens to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TwoWayLayer(first=True), TwoWayLayer(first=False)])
        self.final_attn_token_to_image = Attention(FEATURES // 2)
        self.norm_final_attn = nn.LayerNorm(FEATURES)

    def forward(self, prompts: Tensor, image: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, P, K, D] and image [B, 1, S, D] to both [B, P, …, D]."""
        tokens = prompts
        for layer in self.layers:
            tokens, image = layer(tokens, image, prompts, positions)
        attended = self.final_attn_token_to_image(tokens + prompts, image + positions, image)
        return self.norm_final_attn(tokens + attended), image


class Perceptron(nn.Module):
    """Three layers."""

    def __init__(self, outputs: int):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, outputs)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., outputs]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class PositionEncoding(nn.Module):
    """Random Fourier features of positions in the square that the encoder saw."""

    positional_encoding_gaussian_matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positional_encoding_gaussian_matrix", torch.zeros(2, FEATURES // 2))

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [..., (x, y)] from 0 to 1 → [..., D]."""
        angles = 2 * math.pi * ((2 * positions - 1) @ self.positional_encoding_gaussian_matrix)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class PointEncoder(nn.Module):
    """A point as two tokens, itself and one that says that there is no second; and what stands for "no mask given"."""

    def __init__(self) -> None:
        super().__init__()
        self.pe_layer = PositionEncoding()
        # Background, foreground, and two corners of a box, as in the weights file; a point is foreground.
        self.point_embeddings = nn.ModuleList(nn.Embedding(1, FEATURES) for _ in range(4))
        self.not_a_point_embed = nn.Embedding(1, FEATURES)
        self.no_mask_embed = nn.Embedding(1, FEATURES)

    def forward(self, points: Tensor) -> Tensor:
        """Points [B, P, (x, y)] from 0 to 1 → tokens [B, P, 2, D]."""
        foreground = self.point_embeddings[1](torch.zeros((), dtype=torch.long, device=points.device))
        embedded = self.pe_layer(points) + foreground
        return torch.stack([embedded, self.not_a_point_embed.weight[0].expand_as(embedded)], dim=2)


class MaskDecoder(nn.Module):
    """Masks, and how good they will be, for each point.

    Args:
        scores_objects: SAM 2's: a token before all others says whether there is an object, which is not asked here, and
            the expected IoU is a sigmoid.
    """

    def __init__(self, scores_objects: bool = False) -> None:
        super().__init__()
        self.obj_score_token = nn.Embedding(1, FEATURES) if scores_objects else None
        self._first = int(scores_objects)  # where the token of quality is; those of masks follow
        self.transformer = TwoWayTransformer()
        self.iou_token = nn.Embedding(1, FEATURES)
        self.mask_tokens = nn.Embedding(1 + MASKS, FEATURES)  # the first is for several prompts at once
        self.output_upscaling = nn.Sequential(
            nn.ConvTranspose2d(FEATURES, FEATURES // 4, 2, 2),
            LayerNorm2d(FEATURES // 4),
            nn.GELU(),
            nn.ConvTranspose2d(FEATURES // 4, FEATURES // 8, 2, 2),
            nn.GELU(),
        )
        self.output_hypernetworks_mlps = nn.ModuleList(Perceptron(FEATURES // 8) for _ in range(1 + MASKS))
        self.iou_prediction_head = Perceptron(1 + MASKS)

    def forward(self, features: Tensor, positions: Tensor, prompts: Tensor, least: float) -> Drawn:
        """Masks with 4h × 4w cells from features [B, D, h, w], their positions [S, D] and prompts [B, P, 2, D].

        Only points are drawn of which a mask is expected to reach an IoU of `least`: to see that, the tokens are
        enough, and drawing is a good part of the work.
        """
        height, width = features.shape[-2:]
        image = features.flatten(2).transpose(1, 2).unsqueeze(1)
        tokens = self.with_learned(prompts.to(features.dtype))
        tokens, image = self.transformer(tokens, image, positions.to(features.dtype))
        quality = self.qualities(tokens)
        drawn = quality.amax(-1) >= least  # [B, P]

        grids = image[drawn].transpose(1, 2).unflatten(-1, (height, width))  # [n, D, h, w]
        fine = self.output_upscaling(grids).flatten(2)  # [n, D/8, 16·S]
        logits = (self.kernels(tokens[drawn].unsqueeze(0))[0] @ fine).unflatten(-1, (4 * height, 4 * width))
        return Drawn(drawn.nonzero()[:, 0], logits, quality[drawn])

    def with_learned(self, prompts: Tensor) -> Tensor:
        """The prompts [B, P, 2, D] after the tokens that masks and their quality are read from."""
        tokens = [self.obj_score_token, self.iou_token, self.mask_tokens]
        learned = torch.cat([token.weight for token in tokens if token is not None])
        return torch.cat([learned.expand(*prompts.shape[:2], -1, -1), prompts], dim=2)

    def qualities(self, tokens: Tensor) -> Tensor:
        """The IoU [B, P, K] that is expected of each mask."""
        quality = self.iou_prediction_head(tokens[:, :, self._first])[..., 1:].float()
        return quality if self.obj_score_token is None else quality.sigmoid()

    def kernels(self, tokens: Tensor) -> Tensor:
        """What each mask [B, P, K, D/8] multiplies the finest features with."""
        mlps, first = self.output_hypernetworks_mlps, self._first + 1
        return torch.stack([mlps[at](tokens[:, :, first + at]) for at in range(1, 1 + MASKS)], dim=2)
