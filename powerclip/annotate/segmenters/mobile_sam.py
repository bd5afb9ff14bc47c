"""MobileSAM from its official weights file, `mobile_sam.pt`: a real segmenter of 10 million parameters.

Zhang et al. 2023 (Faster Segment Anything): SAM's decoder on a TinyViT encoder. The authors' package is not on PyPI, so
the network is defined here; `--weights` names the file, from https://github.com/ChaoningZhang/MobileSAM (Apache-2.0).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powerclip.annotate.segmenters.base import Masks, SegmenterImage, file_identity
from powerclip.annotate.segmenters.points import Drawn, PointOptions, PointSegmenter, to_square
from powerclip.annotate.segmenters.sam_decoder import MaskDecoder, PointEncoder
from powerclip.annotate.segmenters.sam_fast import NO_KERNELS, Encoded, FastDecoder, FastPoints, is_possible
from powerclip.annotate.segmenters.tiny_vit import TinyViT
from powerclip.errors import UserError

SIDE = 1024  # of the square in whose top left corner an image lies
PIXEL_MEAN = (123.675, 116.28, 103.53)
PIXEL_STD = (58.395, 57.12, 57.375)
# What the file holds for prompts that are masks, and for classifying ImageNet.
UNUSED = ("prompt_encoder.mask_downscaling.", "image_encoder.head.", "image_encoder.norm_head.")


class MobileSamNetwork(nn.Module):
    """Encoder, prompts and decoder under the names of the weights file."""

    def __init__(self) -> None:
        super().__init__()
        self.image_encoder = TinyViT()
        self.prompt_encoder = PointEncoder()
        self.mask_decoder = MaskDecoder()

    def decode(self, features: Tensor, points: Tensor, least: float = -math.inf) -> Drawn:
        """The masks of points [B, P, (x, y)] from features [B, D, h, w], if one may reach an IoU of `least`."""
        positions = self.positions(features)
        return self.mask_decoder(self.without_mask(features), positions, self.prompt_encoder(points), least)

    def halve(self) -> None:
        """Compute in bf16, but for the positions of points: there it would move them by pixels."""
        self.image_encoder.bfloat16()
        self.mask_decoder.bfloat16()

    def positions(self, features: Tensor) -> Tensor:
        """Where the cells of features [B, D, h, w] are [h·w, D]."""
        height, width = features.shape[-2:]
        rows = (torch.arange(height, device=features.device) + 0.5) / height
        columns = (torch.arange(width, device=features.device) + 0.5) / width
        return self.prompt_encoder.pe_layer(torch.cartesian_prod(rows, columns).flip(-1))

    def without_mask(self, features: Tensor) -> Tensor:
        """Features [B, D, h, w] with what stands for "no mask given"."""
        return features + self.prompt_encoder.no_mask_embed.weight[0, :, None, None].to(features.dtype)


class MobileSam(PointSegmenter):
    """MobileSAM over a grid of points.

    Args:
        weights: `mobile_sam.pt`.
        device: computes.
        at_once: points that the decoder sees together.
        half: in bf16; by default on a GPU.
        fast: in float16, by kernels, on a GPU.
        options: see `PointOptions`.
    """

    name = "mobile_sam"
    version = "1"

    def __init__(
        self,
        weights: Path | None,
        device: torch.device,
        at_once: int | None = None,
        half: bool | None = None,
        fast: bool = False,
        **options: Any,
    ):
        if weights is None:
            raise UserError("segmenter mobile_sam: give the weights file with --weights mobile_sam.pt")
        if fast and not is_possible(device):
            raise UserError(NO_KERNELS)
        identity = {"weights": file_identity(weights)}
        super().__init__(
            PointOptions(**options),
            identity,
            device,
            at_once or (1024 if fast else 512 if device.type == "cuda" else 32),
        )
        self.network = load_network(weights).to(device)
        self._mean = torch.tensor(PIXEL_MEAN, device=device).view(3, 1, 1)
        self._std = torch.tensor(PIXEL_STD, device=device).view(3, 1, 1)
        self._dtype, self._fast = torch.float32, None
        if fast:
            self._dtype = torch.float16
            self.network.image_encoder.to(self._dtype).to(memory_format=torch.channels_last)
            decoder = FastDecoder(self.network.mask_decoder, self._dtype)
            # Positions stay in float32: half precision would move points by pixels.
            self._fast = FastPoints(decoder, self.network.prompt_encoder, self.settings, self._at_once)
        elif half if half is not None else device.type == "cuda":  # on most CPUs it would be slower
            self.network.halve()
            self._dtype = torch.bfloat16

    def encode(self, images: Sequence[SegmenterImage]) -> tuple[Tensor, Tensor]:
        """Features [B, 256, 64, 64] of images whose longer side fills the square."""
        square = torch.zeros(len(images), 3, SIDE, SIDE, device=self.device)
        extent = []
        for at, image in enumerate(images):
            height, width = image.pixels.shape[:2]
            scale = SIDE / max(height, width)
            size = max(1, round(height * scale)), max(1, round(width * scale))
            square[at, :, : size[0], : size[1]] = (to_square(image, size, self.device) - self._mean) / self._std
            extent.append((size[1] / SIDE, size[0] / SIDE))
        return self.network.image_encoder(square.to(self._dtype)), torch.tensor(extent, device=self.device)

    def decode(self, encoded: Tensor, points: Tensor) -> Drawn:
        """Masks with 256 × 256 cells."""
        return self.network.decode(encoded, points, self.settings.quality)

    @torch.inference_mode()
    def submit(self, images: Sequence[SegmenterImage]) -> Callable[[], list[Masks]]:
        """Start to segment images; what is returned waits for their masks."""
        if self._fast is None or not images:
            return super().submit(images)
        features, extent = self.encode(images)
        positions = self.network.positions(features).to(self._dtype)
        image = self.network.without_mask(features).flatten(2).transpose(1, 2).contiguous()
        return self._fast.submit(Encoded(image, positions, features.shape[-1]), extent)


def load_network(weights: Path) -> MobileSamNetwork:
    """The network with the weights of the official file, ready for inference.

    Raises:
        UserError: there is no such file, or it is not MobileSAM's.
    """
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no weights file {weights}; mobile_sam.pt is at github.com/ChaoningZhang/MobileSAM") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        # torch's message advises on loading untrusted files, which does not help here.
        raise UserError(f"{weights} cannot be read as a weights file ({type(error).__name__}): copy it again") from None
    if not isinstance(state, dict):
        raise UserError(f"{weights} is no weights file of MobileSAM")
    network = MobileSamNetwork()
    used = {name: value for name, value in state.items() if not str(name).startswith(UNUSED)}
    try:
        network.load_state_dict(used)
    except RuntimeError:
        missing = sorted(set(network.state_dict()) ^ set(used))
        hint = f", for one {missing[0]}" if missing else ""
        raise UserError(f"{weights} is no weights file of MobileSAM: its tensors differ{hint}") from None
    network.eval().requires_grad_(False)
    network.image_encoder.fuse()
    return network
