"""Batches of embedded scenes: batch number s is a function of the seeds and s alone.

Scenes and captions are drawn as numbers and tokens, by processes ahead of the training where there are several workers
(Python's threads would wait for each other); images are drawn from the numbers on the device that wants them.

Axes: C pairs · M regions · N patches
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from powerclip.alignment.phrases import Phrases
from powerclip.alignment.regions import boxes_of
from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.keyed_random import Draw, keys_of
from powerclip.data.loader import WORKER_KILLED, BatchLoader, begin_worker, box_draws
from powerclip.data.pixels import Normaliser
from powerclip.data.scenes import PackedScenes, generate, pack_scenes, render_packed
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks

_PREFETCHED = 4  # batches that each process has ready


@dataclass(frozen=True)
class _DrawnBatch:
    """A batch before its images are drawn."""

    scenes: PackedScenes
    tokens: Tensor  # [C, L]
    boxes: Tensor  # [4, C, M] uniform numbers
    phrases: Phrases
    keys: list[str]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class _SceneDraw:
    """Draws batches by number; goes to the processes."""

    spec: BatchSpec
    tokenizer: CaptionTokenizer
    rows: slice
    split: str

    def __getitem__(self, step: int) -> _DrawnBatch:
        spec = self.spec
        numbers = range(step * spec.batch_size, (step + 1) * spec.batch_size)[self.rows]
        scenes = [generate(spec.seed, number, self.split) for number in numbers]
        captions = [self.tokenizer.encode(scene.caption) for scene in scenes]
        tokens = self.tokenizer.pad([caption.ids for caption in captions], multiple=spec.length_multiple)
        return _DrawnBatch(
            scenes=pack_scenes(scenes),
            tokens=tokens,
            boxes=box_draws(keys_of(spec.augment_seed, np.array(numbers), Draw.BOXES), spec.regions),
            phrases=pack_phrases([scene.tree for scene in scenes], captions, tokens.shape[1], spec.nodes),
            keys=[f"{self.split}-{spec.seed}-{number}" for number in numbers],
            lengths=tuple(map(len, captions)),
        )


class SceneLoader(BatchLoader):
    """Scenes of a run, each shown once: step s shows numbers s·C … (s+1)·C-1 of those of the seed.

    Args:
        spec: the batches; scenes are square and shown whole.
        tokenizer: gives the tokens of a caption and their place in it.
        ranks: share each batch.
        split: of the scenes, "train" or "collective".
    """

    def __init__(self, spec: BatchSpec, tokenizer: CaptionTokenizer, ranks: Ranks = SINGLE, split: str = "train"):
        super().__init__(spec, ranks)
        if spec.image_size[0] != spec.image_size[1]:
            size = "×".join(map(str, spec.image_size))
            raise UserError(f"data.source: scenes are square, and the model reads images of {size} pixels")
        self.tokenizer = tokenizer
        self._draw = _SceneDraw(spec, tokenizer, self._rows, split)
        self._normalise = Normaliser(spec.mean, spec.std, spec.device)

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        return self._finish(self._draw[step])

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order; by processes where there is more than one worker."""
        if self.spec.workers < 2:
            yield from super().stream(start, stop)
            return
        loader: DataLoader[_DrawnBatch] = DataLoader(
            self._draw,  # type: ignore[arg-type]
            sampler=range(start, stop),
            batch_size=None,
            num_workers=self.spec.workers,
            prefetch_factor=_PREFETCHED,
            worker_init_fn=begin_worker,
        )
        try:
            yield from map(self._finish, loader)
        except (ConnectionError, EOFError):  # in the middle of a message
            raise UserError(WORKER_KILLED) from None

    def _finish(self, drawn: _DrawnBatch) -> Batch:
        """Draw the images, on the device."""
        spec = self.spec
        images = render_packed(drawn.scenes.to(spec.device), spec.image_size[0]).float()
        return Batch(
            images=self._normalise(images),
            tokens=drawn.tokens.to(spec.device),
            regions=boxes_of(drawn.boxes, spec.grid, spec.largest_box).to(spec.device),
            phrases=drawn.phrases.to(spec.device),
            keys=drawn.keys,
            lengths=drawn.lengths,
        )
