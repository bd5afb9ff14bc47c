"""Batches of embedded scenes: batch number s is a function of the seeds and s alone.

Axes: C pairs · M regions · N patches
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from powerclip.alignment.regions import random_boxes
from powerclip.data.batch import Batch
from powerclip.data.loader import BatchLoader, mix, share_of
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD, Normaliser
from powerclip.data.scenes import generate, render
from powerclip.data.tokens import CaptionTokenizer, Nodes, pack_phrases
from powerclip.errors import UserError


class SceneLoader(BatchLoader):
    """Makes the batches of a run, each when it is asked for or a little ahead.

    Args:
        tokenizer: gives the tokens of a caption and their place in it.
        image_size: height and width in pixels; scenes are square.
        grid: rows and columns of patches.
        batch_size: C, of all ranks together.
        regions: M, random boxes of each image.
        largest_box: longest side of a box, as a share of the image's.
        nodes: which constituents of the trees take part.
        seed: which scenes; step s shows numbers s·C … (s+1)·C-1 of them.
        region_seed: which boxes.
        workers: threads that make batches ahead; 0 makes each when it is needed.
        rank, world_size: which of how many equal shares of each batch to make.
        length_multiple: token rows are padded to a multiple of it; compiled towers want few different lengths.
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
        largest_box: float = 1.0,
        nodes: Nodes = "phrases",
        seed: int = 0,
        region_seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        length_multiple: int = 1,
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
    ):
        super().__init__(workers)
        if image_size[0] != image_size[1]:
            size = "×".join(map(str, image_size))
            raise UserError(f"data.source: scenes are square, and the model reads images of {size} pixels")
        self.tokenizer = tokenizer
        self.size = image_size[0]
        self.grid, self.batch_size = grid, batch_size
        self.regions, self.largest_box, self.nodes = regions, largest_box, nodes
        self.seed, self.region_seed = seed, region_seed
        self.length_multiple = length_multiple
        self._own = share_of(batch_size, rank, world_size)
        self._normalise = Normaliser(mean, std)

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)[self._own]
        scenes = [generate(self.seed, number, "train") for number in numbers]
        captions = [self.tokenizer.encode(scene.caption) for scene in scenes]
        tokens = self.tokenizer.pad([caption.ids for caption in captions], multiple=self.length_multiple)
        generator = torch.Generator().manual_seed(mix(self.region_seed, step))
        # Drawn for all ranks: an image has the same boxes on any number of them.
        regions = random_boxes(self.batch_size, self.regions, self.grid, generator, self.largest_box)
        return Batch(
            images=self._normalise(render(scenes, self.size).float()),
            tokens=tokens,
            regions=regions[self._own],
            phrases=pack_phrases([scene.tree for scene in scenes], captions, tokens.shape[1], self.nodes),
            keys=[f"train-{self.seed}-{number}" for number in numbers],
            lengths=tuple(map(len, captions)),
        )
