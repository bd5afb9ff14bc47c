"""Parity: does an exported model give what the model gives, on images and captions?

Axes: C images or captions · L tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from powerclip.encoders import DualEncoder, trim
from powerclip.encoders.transforms import Preprocess, Tokenizer
from powerclip.errors import UserError
from powerclip.evaluate.embedder import evaluating
from powerclip.evaluate.metrics import recall
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import CaptionRetrieval
from powerclip.export.processor import transformers_only_errors
from powerclip.export.towers import OUTPUTS, TEXT, VISION, Precision, TowerName

if TYPE_CHECKING:
    from PIL import Image

SCENES = 64  # of the embedded ones, where no data are named
BATCH = 32
# The largest difference that is accepted. Float32 sums in another order; half precision has 11 bits; int8 has 8, and
# its error depends on the model: the recall beside it says what that costs.
BOUNDS: dict[Precision, float] = {"fp32": 1e-5, "fp16": 5e-3, "int8": 0.1}


class Exported(Protocol):
    """An exported model that runs."""

    def run(self, tower: TowerName, values: Tensor) -> dict[str, Tensor]:
        """The named outputs of one tower."""
        ...


@dataclass(frozen=True)
class CheckData:
    """Images and captions to compare on, as the model reads them."""

    name: str  # what the report calls them
    images: Sequence[Image.Image]
    captions: Sequence[str]
    image_of_caption: Tensor


@dataclass(frozen=True)
class Parity:
    """How far an exported model is from the model."""

    format: str
    precision: Precision
    data: str
    differences: dict[str, float]  # output → largest difference, in shares of the largest value if that is above 1
    recall: float  # mean recall of the exported model, 0 to 1
    reference_recall: float  # of the model itself
    other_tokens: int | None = None  # captions that the written tokenizer splits in another way
    processor: float | None = None  # largest difference of image_embeds where the written processor prepared the images

    @property
    def worst(self) -> float:
        """The largest of the differences."""
        return max(self.differences.values())

    def line(self) -> str:
        """One line for the terminal."""
        outputs = ", ".join(f"{name} {value:.1e}" for name, value in self.differences.items())
        return (
            f"{self.format} {self.precision} on {self.data}: largest difference {outputs}; "
            f"mean recall {100 * self.recall:.2f} %, the model's {100 * self.reference_recall:.2f} %"
        )

    def warnings(self) -> list[str]:
        """What a user of the written files would see differ, beside the towers."""
        if not self.other_tokens:
            return []
        return [
            f"{self.other_tokens:,} captions of {self.data} have other tokens by the written tokenizer: unlike "
            "open_clip's, transformers' does not decode HTML entities or mend broken Unicode"
        ]


def scene_data(model: DualEncoder, count: int = SCENES) -> CheckData:
    """Embedded scenes of the test split, drawn at the size that the model reads."""
    from powerclip.data.scenes import test_scenes
    from powerclip.evaluate.scenes import draw

    scenes = test_scenes(count, seed=0)
    source = draw(scenes, max(model.image_size))
    images = [source.decode(source.read(number)) for number in range(count)]
    captions = [scene.caption for scene in scenes]
    return CheckData(f"{count:,} embedded scenes", images, captions, torch.arange(count))


def read_data(path: Path, limit: int | None = None) -> CheckData:
    """Images and captions of a user: a table or tars, as `powerclip evaluate` reads them; at most `limit` images.

    Raises:
        UserError: there is something else, or an image cannot be read.
    """
    task = read_path(path)
    if not isinstance(task, CaptionRetrieval):
        raise UserError(f"{path}: parity is measured on images with captions (a .csv or tars with captions)")
    count = min(limit or len(task.images.names), len(task.images.names))
    kept = task.image_of_caption < count
    captions = [caption for caption, keep in zip(task.captions, kept.tolist(), strict=True) if keep]
    images = []
    for number in range(count):
        try:
            images.append(task.images.decode(task.images.read(number)))
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{task.images.names[number]}: cannot be read as an image: {error}") from None
    return CheckData(f"{count:,} images of {path.name}", images, captions, task.image_of_caption[kept])


class Checker:
    """The model's own outputs on some data, and how far exported ones are from them."""

    def __init__(self, model: DualEncoder, preprocess: Preprocess, tokenizer: Tokenizer, data: CheckData) -> None:
        self.model, self.data, self._tokenizer = model, data, tokenizer
        self._pixels = torch.stack([preprocess(image) for image in data.images])
        self._tokens = trim(tokenizer(list(data.captions)))
        device = next(model.parameters()).device
        with evaluating(model):
            image = [model.encode_patches(batch.to(device)) for batch in self._pixels.split(BATCH)]
            text = [model.encode_words(batch.to(device)) for batch in self._tokens.split(BATCH)]
        self._reference = {
            VISION: [[output.float().cpu() for output in outputs] for outputs in image],
            TEXT: [[output.float().cpu() for output in outputs] for outputs in text],
        }

    def measure(self, exported: Exported, format: str, precision: Precision, folder: Path | None = None) -> Parity:
        """Compare; with the folder of an export, its tokenizer and its image processor too."""
        differences: dict[str, float] = {}
        embeddings = {}
        for tower, inputs in ((VISION, self._pixels), (TEXT, self._tokens)):
            vectors = []
            for outputs, reference in zip(_run(exported, tower, inputs), self._reference[tower], strict=True):
                for name, expected in zip(OUTPUTS[tower], reference, strict=True):
                    if name in outputs:
                        distance = difference(outputs[name], expected)
                        differences[name] = max(distance, differences.get(name, 0.0))
                vectors.append(outputs[OUTPUTS[tower][0]])
            embeddings[tower] = torch.cat(vectors)
        other_tokens, processor = None, None
        if folder is not None:
            other_tokens = self._other_tokens(folder)
            processor = self._processor_difference(exported, folder)
        return Parity(
            format,
            precision,
            self.data.name,
            differences,
            self._recall(embeddings[VISION], embeddings[TEXT]),
            self._recall(*(torch.cat([outputs[0] for outputs in self._reference[tower]]) for tower in (VISION, TEXT))),
            other_tokens,
            processor,
        )

    def _recall(self, images: Tensor, captions: Tensor) -> float:
        mean_recall = recall(images, captions, self.data.image_of_caption)["mean_recall"]
        assert mean_recall is not None
        return mean_recall

    def _other_tokens(self, folder: Path) -> int:
        from transformers import AutoTokenizer

        with transformers_only_errors():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(list(self.data.captions), truncation=True, max_length=self.model.context_length)["input_ids"]
        # Behind the end of a caption transformers repeats its end, open_clip has zeros: neither is read.
        own = [row[: len(other)] for row, other in zip(self._tokens.tolist(), ids, strict=True)]
        return sum(one != other for one, other in zip(own, ids, strict=True))

    def _processor_difference(self, exported: Exported, folder: Path) -> float:
        from transformers import CLIPImageProcessor

        with transformers_only_errors():
            processor: Any = CLIPImageProcessor.from_pretrained(folder)
        pixels = processor(images=list(self.data.images), return_tensors="pt")["pixel_values"]
        name = OUTPUTS[VISION][0]
        pairs = zip(_run(exported, VISION, pixels), self._reference[VISION], strict=True)
        return max(difference(outputs[name], reference[0]) for outputs, reference in pairs)


def _run(exported: Exported, tower: TowerName, inputs: Tensor) -> Iterator[dict[str, Tensor]]:
    for batch in inputs.split(BATCH):
        yield exported.run(tower, batch)


def difference(values: Tensor, expected: Tensor) -> float:
    """The largest difference, in shares of the largest value where that is above 1; NaN counts as infinite."""
    if values.shape != expected.shape:
        return float("inf")
    distance = ((values - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    return distance if distance == distance else float("inf")


def check_bound(parity: Parity, bound: float | None = None) -> None:
    """Raise `UserError` when a difference is over the bound: the precision's own by default."""
    limit = BOUNDS[parity.precision] if bound is None else bound
    if not parity.worst <= limit:
        name = max(parity.differences, key=parity.differences.__getitem__)
        raise UserError(
            f"the {parity.format} export in {parity.precision} differs from the model: {name} by "
            f"{parity.differences[name]:.1e}, more than {limit:.0e}, on {parity.data}; nothing was written"
        )
