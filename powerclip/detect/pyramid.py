"""A feature pyramid out of one map of patches: upsampled by transposed convolutions, downsampled by pooling.

Li, Mao, Girshick & He, "Exploring Plain Vision Transformer Backbones for Object Detection" (ViTDet), ECCV 2022: a plain
ViT needs no hierarchy and no connections between levels.

Axes: B images · H, W rows and columns of patches
"""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops.misc import Conv2dNormActivation

LEVELS = 4
FINEST = 4  # pixels; a finer map would cost much and say nothing that the patches do not


def strides_of(patch: int) -> tuple[int, ...]:
    """The pixels between two cells of each level, whole numbers: 4, 8, 16, 32 for patches of 8 and of 16 pixels."""
    finest = next(
        patch // factor for factor in (4, 2, 1) if patch % factor == 0 and (patch // factor >= FINEST or factor == 1)
    )
    return tuple(finest * 2**level for level in range(LEVELS))


class SimplePyramid(nn.Module):
    """Maps of `width` channels at the strides of `strides_of`, from the patches of a tower."""

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        self.strides = strides_of(patch)
        self.levels = nn.ModuleList(_level(channels, width, patch / stride) for stride in self.strides)

    def forward(self, patches: Tensor) -> dict[str, Tensor]:
        """The levels of maps [B, channels, H, W], the finest first, under the names that torchvision's parts take."""
        return {str(number): level(patches) for number, level in enumerate(self.levels)}


def _level(channels: int, width: int, scale: float) -> nn.Sequential:
    """One level, `scale` times as fine as the patches."""
    layers: list[nn.Module] = []
    while scale > 1:
        halved = max(width, channels // 2)
        layers += [nn.ConvTranspose2d(channels, halved, 2, stride=2), LayerNorm2d(halved), nn.GELU()]
        channels, scale = halved, scale / 2
    if scale < 1:
        layers.append(nn.MaxPool2d(round(1 / scale)))
    for kernel in (1, 3):
        layers.append(
            Conv2dNormActivation(channels, width, kernel, norm_layer=LayerNorm2d, activation_layer=None, bias=False)
        )
        channels = width
    return nn.Sequential(*layers)
