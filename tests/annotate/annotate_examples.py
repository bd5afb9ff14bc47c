"""Shards made in a moment, and annotators that are slow enough to be stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mini_corpus import write_shard
from PIL import Image

from powerclip.annotate.job import Job
from powerclip.annotate.parsers import Parsed
from powerclip.annotate.pipeline import ShardAnnotator
from powerclip.annotate.tree_annotator import TreeAnnotator
from powerclip.data.trees import Span

LONG = "far too long"  # what WordParser gives up on


def photo(seed: int = 0, size: tuple[int, int] = (64, 48)) -> bytes:
    """A JPEG of two discs before a sky."""
    rng = np.random.default_rng(seed)
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 160 // height, columns * 90 // width, np.full_like(rows, 90)], axis=-1)
    for _ in range(2):
        row, column = rng.uniform(0.2, 0.8, 2) * (height, width)
        disc = (rows - row) ** 2 + (columns - column) ** 2 < (height / rng.uniform(4, 7)) ** 2
        pixels[disc] = rng.integers(0, 255, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "jpeg", quality=92)
    return file.getvalue()


def make_shard(path: Path, captions: Sequence[Sequence[str]], first: int = 0) -> Path:
    """A tar with an image and these captions for each sample; keys are counted from `first`."""
    members: list[tuple[str, bytes | str]] = []
    for number, listed in enumerate(captions, first):
        members += [(f"{number:05d}.jpg", photo(number)), (f"{number:05d}.json", json.dumps({"captions": listed}))]
    return write_shard(path, members)


def make_shards(folder: Path, count: int, samples: int = 3) -> list[str]:
    """`000.tar`, `001.tar`, … with other captions in each."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        str(
            make_shard(
                folder / f"{shard:03d}.tar",
                [[f"a dog number {shard}", f"cat {number}"] for number in range(samples)],
                shard * samples,
            )
        )
        for shard in range(count)
    ]


class WordParser:
    """Every word is a phrase. Counts the captions that it is asked about."""

    name = "words"

    def __init__(self, version: str = "1", seconds: float = 0.0, deadly: str | None = None):
        self.version, self.seconds, self.deadly = version, seconds, deadly
        self.asked: list[str] = []

    def parse(self, captions: Sequence[str]) -> list[Parsed]:
        time.sleep(self.seconds * len(captions))
        if self.deadly is not None and any(self.deadly in caption for caption in captions):
            os.kill(os.getpid(), signal.SIGKILL)
        self.asked += captions
        return [self._parse(caption) for caption in captions]

    def _parse(self, caption: str) -> Parsed:
        if caption == LONG:
            return Parsed((Span(0, len(caption), "ROOT"),), "too long")
        spans, at = [Span(0, len(caption), "ROOT")], 0
        for word in caption.split():
            at = caption.index(word, at)
            spans.append(Span(at, at + len(word), "X"))
            at += len(word)
        return Parsed(tuple(spans))


@dataclass(frozen=True)
class SlowJob(Job):
    """`words` with a pause for each caption; each process that loads it leaves a file with its number in `pids`."""

    pids: Path | None = None
    seconds: float = 0.05
    deadly: str | None = None  # a caption with this in it kills the process

    def check(self) -> None:
        """There is such an annotator."""

    def load(self, worker: int = 0, workers: int = 1) -> ShardAnnotator[Any, Any]:
        if self.pids is not None:
            (self.pids / str(os.getpid())).touch()
        return TreeAnnotator(WordParser(seconds=self.seconds, deadly=self.deadly), self.sidecars)

    def running(self) -> list[int]:
        """The processes that have loaded it."""
        return sorted(int(path.name) for path in self.pids.iterdir()) if self.pids else []
