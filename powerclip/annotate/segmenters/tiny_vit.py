"""TinyViT as MobileSAM's image encoder: images of up to 1,024² to features on a grid of a sixteenth of that.

Wu et al. 2022 (TinyViT-5M: convolutions, then attention in windows with a depthwise convolution after it), with the
last stage at stride 1 and SAM's neck on top, as in Zhang et al. 2023 (MobileSAM). Modules bear the names of the
official weights file, so that it loads as it is.

Axes: B images · H, W rows and columns · D width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

WIDTHS = (64, 128, 160, 320)
DEPTHS = (2, 2, 6, 2)
HEADS = (2, 4, 5, 10)
WINDOWS = (7, 7, 14, 7)
FEATURES = 256  # of the neck, SAM's width


class ConvNorm(nn.Module):
    """A convolution and its batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1):
        super().__init__()
        self.c = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] → [B, outputs, H/stride, W/stride]."""
        return self.bn(self.c(x))

    def fuse(self) -> None:
        """Fold the norm into the convolution: for a trained network, the same in one pass."""
        if isinstance(self.bn, nn.BatchNorm2d):
            self.c, self.bn = fuse_conv_bn_eval(self.c, self.bn), nn.Identity()


class MBConv(nn.Module):
    """An inverted bottleneck: 1 × 1 expansion, depthwise convolution, 1 × 1 projection."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = ConvNorm(width, 4 * width)
        self.conv2 = ConvNorm(4 * width, 4 * width, 3, groups=4 * width)
        self.conv3 = ConvNorm(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, H, W] → the same shape."""
        return F.gelu(x + self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x))))))


class PatchMerging(nn.Module):
    """The step from one stage's width and resolution to the next one's."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = ConvNorm(inputs, outputs)
        self.conv2 = ConvNorm(outputs, outputs, 3, stride, groups=outputs)
        self.conv3 = ConvNorm(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] → [B, outputs, H/stride, W/stride]."""
        return self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x)))))


class WindowAttention(nn.Module):
    """Attention among the cells of a window, with a learned bias for each distance."""

    bias_index: Tensor  # [cells, cells] which bias a pair of cells has

    def __init__(self, width: int, heads: int, window: int):
        super().__init__()
        self.heads, self.window = heads, window
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.attention_biases = nn.Parameter(torch.zeros(heads, window * window))
        row, column = torch.arange(window * window).div(window, rounding_mode="floor"), torch.arange(window**2) % window
        bias_index = (row[:, None] - row).abs() * window + (column[:, None] - column).abs()
        self.register_buffer("bias_index", bias_index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[windows, cells, D] → the same shape."""
        count, cells, width = x.shape
        # Each head's query, key and value lie together.
        mixed = self.qkv(self.norm(x)).view(count, cells, self.heads, 3, width // self.heads)
        query, key, value = mixed.permute(3, 0, 2, 1, 4).unbind(0)  # [windows, heads, cells, D/heads]
        bias = self.attention_biases[:, self.bias_index].to(query.dtype).expand(count, -1, -1, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.proj(mixed.transpose(1, 2).reshape(count, cells, width))


class Mlp(nn.Module):
    """A norm and two layers."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → the same shape."""
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class AttentionBlock(nn.Module):
    """Attention in windows, a depthwise convolution across their borders, and a perceptron."""

    def __init__(self, width: int, heads: int, window: int):
        super().__init__()
        self.attn = WindowAttention(width, heads, window)
        self.local_conv = ConvNorm(width, width, 3, groups=width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, H, W] → the same shape."""
        cells = x.permute(0, 2, 3, 1)
        cells = cells + self._windowed(cells)
        x = self.local_conv(cells.permute(0, 3, 1, 2))
        cells = x.permute(0, 2, 3, 1)
        return (cells + self.mlp(cells)).permute(0, 3, 1, 2)

    def _windowed(self, cells: Tensor) -> Tensor:
        """Attention within each window; the grid is padded with zeros to whole windows."""
        side = self.attn.window
        count, height, width, depth = cells.shape
        padded = F.pad(cells, (0, 0, 0, -width % side, 0, -height % side))
        down, across = padded.shape[1] // side, padded.shape[2] // side
        windows = padded.view(count, down, side, across, side, depth).transpose(2, 3).reshape(-1, side * side, depth)
        mixed = self.attn(windows).view(count, down, across, side, side, depth).transpose(2, 3)
        return mixed.reshape(count, down * side, across * side, depth)[:, :height, :width]


class Stage(nn.Module):
    """Blocks of one width, then the step to the next."""

    def __init__(self, number: int, stride: int | None):
        super().__init__()
        width = WIDTHS[number]
        self.blocks = nn.Sequential(
            *(
                AttentionBlock(width, HEADS[number], WINDOWS[number]) if number else MBConv(width)
                for _ in range(DEPTHS[number])
            )
        )
        self.downsample = nn.Identity() if stride is None else PatchMerging(width, WIDTHS[number + 1], stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, H, W] → [B, next D, H/stride, W/stride]."""
        return self.downsample(self.blocks(x))


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of [B, D, H, W]."""

    def __init__(self, width: int):
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, H, W] → the same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class PatchEmbedding(nn.Module):
    """Pixels to the first stage's features, a quarter of their rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(
            ConvNorm(3, WIDTHS[0] // 2, 3, 2), nn.GELU(), ConvNorm(WIDTHS[0] // 2, WIDTHS[0], 3, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] → [B, D, H/4, W/4]."""
        return self.seq(x)


class TinyViT(nn.Module):
    """MobileSAM's image encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding()
        self.layers = nn.Sequential(*(Stage(number, stride) for number, stride in enumerate((2, 2, 1, None))))
        self.neck = nn.Sequential(
            nn.Conv2d(WIDTHS[-1], FEATURES, 1, bias=False),
            LayerNorm2d(FEATURES),
            nn.Conv2d(FEATURES, FEATURES, 3, padding=1, bias=False),
            LayerNorm2d(FEATURES),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Images [B, 3, H, W], normalised, to features [B, FEATURES, H/16, W/16]."""
        return self.neck(self.layers(self.patch_embed(pixels)))

    def fuse(self) -> None:
        """Fold every batch norm into its convolution."""
        for module in self.modules():
            if isinstance(module, ConvNorm):
                module.fuse()
