"""Batches of embedded scenes: batch number s is a function of the seeds and s alone.

Axes: C pairs · M regions · N patches
"""

from __future__ import annotations

import numpy as np

from powerclip.alignment.regions import boxes_of
from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.keyed_random import Draw, keys_of
from powerclip.data.loader import BatchLoader, box_draws
from powerclip.data.pixels import Normaliser
from powerclip.data.scenes import generate, render
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks


class SceneLoader(BatchLoader):
    """Scenes of a run, each shown once: step s shows numbers s·C … (s+1)·C-1 of those of the seed.

    Args:
        spec: the batches; scenes are square, shown whole, and made on the CPU.
        tokenizer: gives the tokens of a caption and their place in it.
        ranks: share each batch.
    """

    def __init__(self, spec: BatchSpec, tokenizer: CaptionTokenizer, ranks: Ranks = SINGLE):
        super().__init__(spec, ranks)
        if spec.image_size[0] != spec.image_size[1]:
            size = "×".join(map(str, spec.image_size))
            raise UserError(f"data.source: scenes are square, and the model reads images of {size} pixels")
        self.tokenizer = tokenizer
        self._normalise = Normaliser(spec.mean, spec.std)

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        spec = self.spec
        numbers = range(step * spec.batch_size, (step + 1) * spec.batch_size)[self._rows]
        scenes = [generate(spec.seed, number, "train") for number in numbers]
        captions = [self.tokenizer.encode(scene.caption) for scene in scenes]
        tokens = self.tokenizer.pad([caption.ids for caption in captions], multiple=spec.length_multiple)
        boxes = box_draws(keys_of(spec.augment_seed, np.array(numbers), Draw.BOXES), spec.regions)
        return Batch(
            images=self._normalise(render(scenes, spec.image_size[0]).float()),
            tokens=tokens,
            regions=boxes_of(boxes, spec.grid, spec.largest_box),
            phrases=pack_phrases([scene.tree for scene in scenes], captions, tokens.shape[1], spec.nodes),
            keys=[f"train-{spec.seed}-{number}" for number in numbers],
            lengths=tuple(map(len, captions)),
        )
