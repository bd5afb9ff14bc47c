"""Batches of embedded scenes: batch number s is a function of the seeds and s alone.

Scenes and captions are drawn as numbers and tokens, by processes ahead of the training where there are several workers
(Python's threads would wait for each other); images are drawn from the numbers on the device that wants them.

Axes: C pairs · M regions · N patches
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from powerclip.alignment.regions import regions_of
from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.keyed_random import Draw, keys_of
from powerclip.data.loader import WORKER_KILLED, BatchLoader, begin_worker, box_draws
from powerclip.data.pixels import Normaliser
from powerclip.data.scene_captions import PackedCaptions, SceneCaptions
from powerclip.data.scene_store import BatchStore, pack, unpack
from powerclip.data.scenes import PackedScenes, generate, pack_scenes, render_packed
from powerclip.data.tokens import CaptionTokenizer
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks

_PREFETCHED = 4  # batches that each process has ready


@dataclass(frozen=True)
class _DrawnBatch:
    """A batch before its images are drawn."""

    scenes: PackedScenes
    captions: PackedCaptions
    boxes: Tensor  # [4, C, M] uniform numbers
    keys: list[str]


class _SceneDraw:
    """Draws batches by number; goes to the processes."""

    def __init__(self, spec: BatchSpec, tokenizer: CaptionTokenizer, rows: slice, collective: float) -> None:
        self.spec, self.rows, self._collective = spec, rows, collective
        self._tokenizer = tokenizer
        self._captions = SceneCaptions(tokenizer, spec.nodes, spec.length_multiple)

    def __getitem__(self, step: int) -> _DrawnBatch:
        spec = self.spec
        numbers = range(step * spec.batch_size, (step + 1) * spec.batch_size)[self.rows]
        scenes = [generate(spec.seed, number, self._split(number)) for number in numbers]
        return _DrawnBatch(
            scenes=pack_scenes(scenes),
            captions=self._captions.pack(scenes),
            boxes=box_draws(keys_of(spec.augment_seed, np.array(numbers), Draw.BOXES), spec.regions),
            keys=[f"{scene.split}-{scene.seed}-{scene.index}" for scene in scenes],
        )

    @property
    def identity(self) -> str:
        """Everything that decides what a batch of a number holds, before its images are drawn."""
        spec, tokenizer = self.spec, self._tokenizer
        drawn = (spec.seed, spec.augment_seed, spec.batch_size, self.rows, spec.regions, self._collective)
        said = (tokenizer.name, tokenizer.context_length, tokenizer.splits_words, spec.nodes, spec.length_multiple)
        return repr((drawn, said))

    def _split(self, number: int) -> str:
        """The split of a scene: those of the share are spread evenly."""
        share = self._collective
        return "collective" if int((number + 1) * share) > int(number * share) else "train"


@dataclass(frozen=True)
class _PackedDraw:
    """Draws batches as bytes, or reads those that are kept."""

    draw: _SceneDraw
    store: BatchStore | None

    def __getitem__(self, step: int) -> bytes:
        if self.store is None:
            return pack(self.draw[step])
        return self.store.get(step, lambda: pack(self.draw[step]))


class SceneLoader(BatchLoader):
    """Scenes of a run, each shown once: step s shows numbers s·C … (s+1)·C-1 of those of the seed.

    Args:
        spec: the batches; scenes are square and shown whole.
        tokenizer: gives the tokens of a caption and their place in it.
        ranks: share each batch.
        collective: share of the scenes that are of split "collective" instead of "train".
        cache: a folder that keeps what is drawn, a kilobyte a scene, for other runs that want the same.
    """

    def __init__(
        self,
        spec: BatchSpec,
        tokenizer: CaptionTokenizer,
        ranks: Ranks = SINGLE,
        collective: float = 0.0,
        cache: Path | None = None,
    ):
        super().__init__(spec, ranks)
        if spec.image_size[0] != spec.image_size[1]:
            size = "×".join(map(str, spec.image_size))
            raise UserError(f"data.source: scenes are square, and the model reads images of {size} pixels")
        self.tokenizer = tokenizer
        draw = _SceneDraw(spec, tokenizer, self._rows, collective)
        self._draw = _PackedDraw(draw, BatchStore(cache, draw.identity) if cache else None)
        self._normalise = Normaliser(spec.mean, spec.std, spec.device)

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        drawn = self._draw.draw[step] if self._draw.store is None else unpack(self._draw[step], self.spec.device)
        return self._finish(drawn)

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order; by processes where there is more than one worker."""
        if self.spec.workers < 2:
            yield from super().stream(start, stop)
            return
        loader: DataLoader[bytes] = DataLoader(
            self._draw,  # type: ignore[arg-type]
            sampler=range(start, stop),
            batch_size=None,
            num_workers=self.spec.workers,
            prefetch_factor=_PREFETCHED,
            worker_init_fn=begin_worker,
        )
        try:
            for packed in loader:
                yield self._finish(unpack(packed, self.spec.device))
        except (ConnectionError, EOFError):  # in the middle of a message
            raise UserError(WORKER_KILLED) from None

    def _finish(self, drawn: _DrawnBatch) -> Batch:
        """Draw the images, on the device."""
        spec = self.spec
        images = render_packed(drawn.scenes.to(spec.device), spec.image_size[0]).float()
        return Batch(
            images=self._normalise(images),
            tokens=drawn.captions.tokens.to(spec.device),
            regions=regions_of(drawn.boxes.to(spec.device), spec.grid, spec.drawn, spec.largest_box),
            phrases=drawn.captions.phrases.to(spec.device),
            keys=drawn.keys,
            lengths=drawn.captions.lengths,
        )
