"""Set accuracy: which of an image's boxes a phrase takes together, and how well they are its own.

Axes: N patches of an image · M boxes of an image · T phrases of all images · D width
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from powerclip.alignment.regions import embed_regions
from powerclip.evaluate import metrics

if TYPE_CHECKING:
    from powerclip.evaluate.tasks import PointingGame


class SetChoice:
    """The best set of an image's gold boxes for each of its phrases, and its F1.

    Images with one box, where there is nothing to choose, and with too many are left out.
    """

    def __init__(
        self,
        game: PointingGame,
        queries: Mapping[str, Tensor],
        grid: tuple[int, int],
        score: metrics.SetScore,
        most_regions: int,
    ) -> None:
        self._game = game
        self._queries = queries
        self._grid = grid
        self._score = score
        self._phrases_of = game.phrases_of_images()
        # All objects of an image, where they are known, else the boxes that its phrases name.
        boxes = game.boxes if game.objects is None else game.objects
        self._regions = {
            image: list(dict.fromkeys(box for phrase in phrases for box in boxes[phrase]))
            for image, phrases in self._phrases_of.items()
        }
        self._chosen = {image for image, boxes in self._regions.items() if 1 < len(boxes) <= most_regions}
        self.has_sets = torch.tensor([image in self._chosen for image in game.image_of_phrase])  # T
        rules = ("", "_best_box", "_relative")
        names = [*(f"{query}{rule}" for query in queries for rule in rules), "all_boxes"]
        self.f1 = {query: torch.zeros(len(game.spans), dtype=torch.double) for query in names}  # T each

    def choose(self, image: int, patches: Tensor) -> None:
        """Choose for the phrases of an image, given its patches [N, D]."""
        if image not in self._chosen:
            return
        numbers, boxes = self._phrases_of[image], self._regions[image]
        masks = metrics.box_masks(torch.tensor(boxes), self._grid).flatten(1)
        regions = embed_regions(patches[None].cpu().float(), masks[None])[0]
        gram = regions @ regions.T
        gold = torch.tensor([[box in self._game.boxes[phrase] for box in boxes] for phrase in numbers])
        for query, directions in self._queries.items():
            q = normalize(directions[numbers].float(), dim=-1) @ regions.T
            self.f1[query][numbers] = metrics.set_f1(q, gram, gold, self._score)
            self.f1[f"{query}_best_box"][numbers] = metrics.set_f1(q, gram, gold, "mean")
            self.f1[f"{query}_relative"][numbers] = metrics.set_f1(q, gram, gold, "relative")
        named = gold.sum(1).double()
        self.f1["all_boxes"][numbers] = 2 * named / (named + len(boxes))
