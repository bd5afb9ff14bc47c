"""Batches of embedded scenes: batch number s is a function of the seeds and s alone, so resuming needs no state.

Axes: C pairs · M regions · N patches
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch

from powerclip.alignment.regions import random_boxes
from powerclip.data.batch import Batch
from powerclip.data.scenes import generate, render
from powerclip.data.tokens import CaptionTokenizer, pack_phrases

# CLIP's own: what open_clip normalises with unless a model says otherwise.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class BatchLoader(ABC):
    """Batches that are a function of their number, made when they are asked for or a little ahead.

    `workers` threads make batches ahead; 0 makes each when it is needed.
    """

    def __init__(self, workers: int = 0):
        self.workers = workers

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order."""
        if self.workers == 0:
            yield from map(self.batch, range(start, stop))
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="batches")
        steps = iter(range(start, stop))
        ahead: deque[Future[Batch]] = deque()
        try:
            for step in steps:
                ahead.append(pool.submit(self.batch, step))
                # One in reserve for each thread that is at work.
                if len(ahead) > 2 * self.workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # Reached too when the consumer stops early: nothing is left running behind its back.
            pool.shutdown(wait=True, cancel_futures=True)


class SceneLoader(BatchLoader):
    """Makes the batches of a run, each when it is asked for or a little ahead.

    Args:
        tokenizer: gives the tokens of a caption and their place in it.
        image_size: height and width in pixels; scenes are square.
        grid: rows and columns of patches.
        batch_size: C.
        regions: M, random boxes of each picture.
        nodes: which constituents of the trees take part.
        seed: which scenes; step s shows numbers s·C … (s+1)·C-1 of them.
        region_seed: which boxes.
        workers: threads that make batches ahead; 0 makes each when it is needed.
        mean, std: what the image tower wants its pixels normalised with.
    """

    def __init__(
        self,
        *,
        tokenizer: CaptionTokenizer,
        image_size: tuple[int, int],
        grid: tuple[int, int],
        batch_size: int,
        regions: int = 10,
        nodes: Literal["phrases", "all"] = "phrases",
        seed: int = 0,
        region_seed: int = 0,
        workers: int = 0,
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
    ):
        super().__init__(workers)
        if image_size[0] != image_size[1]:
            raise ValueError(f"scenes are square, image_size {image_size} is not")
        self.tokenizer = tokenizer
        self.size = image_size[0]
        self.grid, self.batch_size = grid, batch_size
        self.regions, self.nodes = regions, nodes
        self.seed, self.region_seed = seed, region_seed
        # x/255 normalised is one multiplication and one addition on the bytes.
        self._scale = torch.tensor([1 / (255 * s) for s in std]).view(3, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(3, 1, 1)

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        first = step * self.batch_size
        scenes = [generate(self.seed, first + i, "train") for i in range(self.batch_size)]
        captions = [self.tokenizer.encode(scene.caption) for scene in scenes]
        tokens = self.tokenizer.pad([caption.ids for caption in captions])
        generator = torch.Generator().manual_seed(mix(self.region_seed, step))
        return Batch(
            images=render(scenes, self.size).float().mul_(self._scale).add_(self._shift),
            tokens=tokens,
            regions=random_boxes(self.batch_size, self.regions, self.grid, generator),
            phrases=pack_phrases([scene.tree for scene in scenes], captions, tokens.shape[1], self.nodes),
            keys=[f"train-{self.seed}-{first + i}" for i in range(self.batch_size)],
        )


def mix(seed: int, step: int) -> int:
    """One number for the pair. The CPU generator looks at 32 bits of its seed only: sums would meet."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=4).digest(), "little")
