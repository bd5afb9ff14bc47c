"""Batches of images with boxes for training: batch number s is a function of the seed and s alone.

Axes: n boxes of one image
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.data.keyed_random import key_of, permutation, uniform
from powerclip.detect.data import BoxSet, in_pixels
from powerclip.errors import UserError

KEPT_BYTES = 4 * 2**30  # of decoded images that are kept: small data are decoded once
_AHEAD = 2  # batches that are prepared while one is learned from
_FLIP = 1  # what a key is for


@dataclass(frozen=True)
class BoxBatch:
    """Images and their boxes in pixels."""

    images: list[Tensor]  # [3, H, W] uint8 each
    boxes: list[Tensor]  # [n, 4]
    labels: list[Tensor]  # [n]
    counts: Counter[str]  # images that could not be read


class BoxLoader:
    """Batches of a set: each epoch in an order of its own, half of the images mirrored.

    Args:
        data: images with boxes; crowds are left out.
        size: most pixels of a side.
        batch_size: images of a batch; those that cannot be read are missing from it.
        seed: decides the order and what is mirrored.
    """

    def __init__(self, data: BoxSet, size: int, batch_size: int, seed: int):
        self.data, self.size, self.batch_size, self.seed = data, size, batch_size, seed
        self._keeps = 3 * size * size * len(data) <= KEPT_BYTES
        self._kept: dict[int, Tensor] = {}
        self._orders: dict[int, list[int]] = {}

    def numbers(self, step: int) -> list[tuple[int, int]]:
        """Epoch and image of each place of batch `step`; a batch may end one epoch and begin the next."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [
            (place // len(self.data), self._order(place // len(self.data))[place % len(self.data)]) for place in places
        ]

    def batch(self, step: int, read: list[Future[Tensor | None]] | None = None) -> BoxBatch:
        """The batch that the update after `step` finished ones sees."""
        images, boxes, labels, counts = [], [], [], Counter[str]()
        for place, (epoch, number) in enumerate(self.numbers(step)):
            image = self._read(number) if read is None else read[place].result()
            if image is None:
                counts["unreadable"] += 1
                continue
            annotated = self.data.images[number]
            shares, label = annotated.boxes[~annotated.crowd], annotated.labels[~annotated.crowd]
            if uniform(key_of(self.seed, epoch, number, _FLIP), 0) < 0.5:
                image = image.flip(-1)
                shares = torch.stack([1 - shares[:, 2], shares[:, 1], 1 - shares[:, 0], shares[:, 3]], 1)
            images.append(image)
            boxes.append(in_pixels(shares, (image.shape[1], image.shape[2])))
            labels.append(label)
        if not images:
            first = self.data.images[self.numbers(step)[0][1]].name
            raise UserError(
                f"{self.data.source}: none of the {self.batch_size} images of a batch can be read, such as {first}"
            )
        return BoxBatch(images, boxes, labels, counts)

    def stream(self, start: int, stop: int) -> Generator[BoxBatch, None, None]:
        """Batches `start` … `stop`-1, decoded ahead by threads."""
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            waiting: list[list[Future[Tensor | None]]] = []
            for step in range(start, stop):
                while len(waiting) <= _AHEAD and step + len(waiting) < stop:
                    waiting.append([pool.submit(self._read, k) for _, k in self.numbers(step + len(waiting))])
                yield self.batch(step, waiting.pop(0))

    def _read(self, number: int) -> Tensor | None:
        image = self._kept.get(number)
        if image is None:
            image = self.data.read(number, self.size)
            if self._keeps and image is not None:
                self._kept[number] = image
        return image

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key >= epoch - 1}
            self._orders[epoch] = permutation(key_of(self.seed, epoch), len(self.data)).tolist()
        return self._orders[epoch]
