"""Images with boxes, from whatever source: what training, evaluation and the naming of boxes read.

Boxes are left, top, right and bottom in shares of the image's sides, so that they fit the image at every size.

Axes: n boxes of one image · H, W height and width
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from powerclip.detect.classes import Classes
from powerclip.errors import UserError


class Pixels(Protocol):
    """Where the images of a set come from."""

    def read(self, number: int, longest: int) -> Tensor | None:
        """An image [3, H, W] uint8 whose sides have at most `longest` pixels; None where it cannot be read."""
        ...


@dataclass(frozen=True)
class BoxedImage:
    """An image and what is annotated in it."""

    name: str
    size: tuple[int, int]  # height and width as annotated
    boxes: Tensor  # [n, 4] in shares, left before right and top above bottom
    labels: Tensor  # [n] long, into the classes
    crowd: Tensor  # [n] bool: a box around many, neither learned nor counted against a detector


@dataclass(frozen=True)
class BoxSet:
    """Images with boxes, and the classes that their labels number."""

    source: str  # what messages call it
    classes: Classes
    images: tuple[BoxedImage, ...]
    pixels: Pixels
    numbers: tuple[int, ...]  # of each image among the pixels
    faults: tuple[str, ...] = ()  # what was wrong with it, one line each

    def __len__(self) -> int:
        return len(self.images)

    @property
    def boxes(self) -> int:
        """How many boxes there are."""
        return sum(len(image.labels) for image in self.images)

    def read(self, number: int, longest: int) -> Tensor | None:
        """The pixels of an image."""
        return self.pixels.read(self.numbers[number], longest)

    def counts(self) -> Tensor:
        """Boxes of each class [K]; crowds are not counted."""
        labels = [image.labels[~image.crowd] for image in self.images]
        return torch.bincount(torch.cat([torch.zeros(0, dtype=torch.long), *labels]), minlength=len(self.classes))

    def take(self, numbers: Sequence[int]) -> BoxSet:
        """Some of the images."""
        images, rows = tuple(self.images[k] for k in numbers), tuple(self.numbers[k] for k in numbers)
        return replace(self, images=images, numbers=rows)

    def only(self, labels: Sequence[int]) -> BoxSet:
        """The same with these classes alone, in this order; other boxes are dropped, and images that keep none."""
        classes = Classes(
            tuple(self.classes.names[label] for label in labels), tuple(self.classes.novel[label] for label in labels)
        )
        position = torch.full((len(self.classes),), -1)
        position[torch.tensor(labels, dtype=torch.long)] = torch.arange(len(labels))
        images, numbers = [], []
        for image, number in zip(self.images, self.numbers, strict=True):
            mapped = position[image.labels]
            keep = mapped >= 0
            if keep.any():
                kept = (image.boxes[keep], mapped[keep], image.crowd[keep])
                images.append(BoxedImage(image.name, image.size, *kept))
                numbers.append(number)
        return replace(self, classes=classes, images=tuple(images), numbers=tuple(numbers))

    def with_classes(self, classes: Classes) -> BoxSet:
        """The same boxes, their labels numbering other classes."""
        return replace(self, classes=classes)

    def base(self) -> BoxSet:
        """What training may see: boxes of base classes, and the images that have one.

        Raises:
            UserError: there is none.
        """
        kept = self.only(self.classes.numbers(novel=False))
        learned = kept.take([k for k, image in enumerate(kept.images) if not image.crowd.all()])
        if not learned.images:
            raise UserError(f"{self.source}: no box of a base class: nothing to train on")
        return learned


def read_in_batches(data: BoxSet, longest: int, multiple: int, most: int) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Images with their numbers, those together that have one size once they are padded to a `multiple` of pixels.

    So a network sees an image with the same border whichever images are evaluated with it. An image that cannot be read
    is left out.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number, image in enumerate(data.images):
        scale = longest / max(image.size)
        height, width = (-(-round(side * scale) // multiple) for side in image.size)
        groups.setdefault((height, width), []).append(number)
    batches = [members[k : k + most] for members in groups.values() for k in range(0, len(members), most)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:

        def begin(batch: list[int]) -> list[Future[Tensor | None]]:
            return [pool.submit(data.read, number, longest) for number in batch]

        ahead = begin(batches[0]) if batches else []
        for position, batch in enumerate(batches):
            now, ahead = ahead, begin(batches[position + 1]) if position + 1 < len(batches) else []
            read = [
                (number, pixels) for number, one in zip(batch, now, strict=True) if (pixels := one.result()) is not None
            ]
            if read:
                yield [number for number, _ in read], [pixels for _, pixels in read]


def in_pixels(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Boxes [n, 4] in shares as pixels of an image of this height and width."""
    height, width = size
    return boxes * boxes.new_tensor([width, height, width, height])


def in_shares(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Boxes [n, 4] in pixels as shares of an image of this height and width."""
    height, width = size
    return boxes / boxes.new_tensor([width, height, width, height])
