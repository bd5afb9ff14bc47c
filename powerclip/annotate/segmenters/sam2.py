"""SAM 2 through transformers: `facebook/sam2.1-hiera-large` and smaller models, from the hub or a local folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerclip.annotate.segmenters.base import Masks, SegmenterImage, file_identity
from powerclip.annotate.segmenters.points import Drawn, PointOptions, PointSegmenter, to_square
from powerclip.annotate.segmenters.sam2_fast import encoded, is_known, mask_decoder, point_encoder
from powerclip.annotate.segmenters.sam_fast import NO_KERNELS, FastDecoder, FastPoints, is_possible
from powerclip.errors import UserError

DEFAULT = "facebook/sam2.1-hiera-small"
# Its edges are softer than SAM's: with SAM's thresholds small images keep no mask at all.
QUALITY, STABILITY = 0.7, 0.8
# ImageNet's, which SAM 2 was trained with, for values from 0 to 255.
PIXEL_MEAN = (123.675, 116.28, 103.53)
PIXEL_STD = (58.395, 57.12, 57.375)


class Sam2(PointSegmenter):
    """SAM 2's image model over a grid of points.

    Args:
        weights: a name on the hub or a folder.
        device: computes.
        at_once: points that the decoder sees together.
        fast: the decoder in float16, by kernels, on a GPU; for models of the released sizes.
        options: see `PointOptions`.
    """

    name = "sam2"
    version = "1"

    def __init__(
        self,
        weights: str | None,
        device: torch.device,
        at_once: int | None = None,
        fast: bool = False,
        **options: Any,
    ):
        self.network, identity = _load(weights or DEFAULT)
        if fast and not (is_possible(device) and is_known(self.network)):
            raise UserError(NO_KERNELS)
        default = 1024 if fast else 512 if device.type == "cuda" else 32
        options = {"quality": QUALITY, "stability": STABILITY, **options}
        super().__init__(PointOptions(**options), {"weights": identity}, device, at_once or default)
        self.network.to(device)
        self._fast = None
        if fast:
            decoder, prompts = FastDecoder(mask_decoder(self.network)), point_encoder(self.network)
            self._fast = FastPoints(decoder, prompts, self.settings, self._at_once)
        size = self.network.config.prompt_encoder_config.image_size
        self._size = (size, size) if isinstance(size, int) else tuple(size)
        self._mean = torch.tensor(PIXEL_MEAN, device=device).view(3, 1, 1)
        self._std = torch.tensor(PIXEL_STD, device=device).view(3, 1, 1)

    def encode(self, images: Sequence[SegmenterImage]) -> tuple[list[Tensor], Tensor]:
        """Features at three resolutions of images that are squashed to the model's square."""
        pixels = [(to_square(image, self._size, self.device) - self._mean) / self._std for image in images]
        with self._half():
            features = self.network.get_image_embeddings(torch.stack(pixels))
        return features, torch.ones(len(images), 2, device=self.device)

    def decode(self, encoded: list[Tensor], points: Tensor) -> Drawn:
        """The masks of all points."""
        corner = torch.tensor(self._size[::-1], device=points.device)
        with self._half():
            output = self.network(
                image_embeddings=encoded,
                # Each point is a prompt of its own; pixels are named by their corners.
                input_points=(points * corner - 0.5).unsqueeze(2),
                input_labels=torch.ones(*points.shape[:2], 1, dtype=torch.int, device=points.device),
                multimask_output=True,
            )
        owner = torch.arange(len(points), device=points.device).repeat_interleave(points.shape[1])
        return Drawn(owner, output.pred_masks.flatten(0, 1), output.iou_scores.flatten(0, 1).float())

    @torch.inference_mode()
    def submit(self, images: Sequence[SegmenterImage]) -> Callable[[], list[Masks]]:
        """Start to segment images; what is returned waits for their masks."""
        if self._fast is None or not images:
            return super().submit(images)
        features, extent = self.encode(images)
        return self._fast.submit(encoded(features, self._fast.prompt, self._fast.decoder.dtype), extent)

    def _half(self) -> AbstractContextManager[None]:
        """Half precision where it is quicker, on a GPU."""
        return torch.autocast(
            self.device.type, torch.float16 if self._fast else torch.bfloat16, enabled=self.device.type == "cuda"
        )


def _load(name: str) -> tuple[Any, str]:
    """The model, and a string that identifies its weights."""
    try:
        from transformers import Sam2Model
    except ImportError:
        raise UserError("segmenter sam2 needs transformers 4.56 or newer: pip install 'powerclip[sam]'") from None
    try:
        network = Sam2Model.from_pretrained(name, dtype=torch.float32)  # also of a file in half precision
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"SAM 2 cannot be loaded from {name!r}: {reason}") from None
    folder = Path(name)
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        identity = " ".join(file_identity(file) for file in files)
    else:
        identity = f"{name}@{getattr(network.config, '_commit_hash', None)}"
    return network.eval().requires_grad_(False), identity
