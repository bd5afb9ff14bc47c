"""Grounding on hand-made maps: gold boxes win; what ignores its phrase, the image or the sentence is exposed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from powerclip.data.trees import Span
from powerclip.evaluate.embedder import Embedded
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.metrics import balancing_weights, cells_in_boxes, relative_maps
from powerclip.evaluate.tasks import Grounding, PointingGame
from powerclip.runtime.distributed import SINGLE

GRID = (8, 8)
DOG, CHAIR, CUP = (0.3, 0.3, 0.6, 0.7), (0.0, 0.0, 0.25, 0.5), (0.75, 0.5, 1.0, 1.0)
BIRDS = [(0.0, 0.75, 0.25, 1.0), (0.75, 0.0, 1.0, 0.25)]
NAMES: dict[str, list[tuple[float, float, float, float]]] = {
    "dog": [DOG], "chair": [CHAIR], "cup": [CUP], "birds": BIRDS,
}  # fmt: skip


class KnownFeatures:
    """An embedder whose patches and phrases are given: `query(number, phrase)` [D] and `patches(image)` [N, D]."""

    encoder = SimpleNamespace(grid=GRID)
    ranks = SINGLE

    def __init__(self, query, patches):
        self._query = query
        self._patches = patches

    def phrases(self, captions, trees):
        spans = [(caption, tree.nodes[0]) for caption, tree in zip(captions, trees, strict=True)]
        return self.texts([caption[span.start : span.end] for caption, span in spans])

    def texts(self, texts):
        return torch.stack([self._query(number, text) for number, text in enumerate(texts)])

    def patches(self, source, use):
        for number in range(len(source.names)):
            use([number], self._patches(number)[None])
        count = len(source.names)
        return Embedded(torch.zeros(count, 0), torch.ones(count, dtype=torch.bool), ())


def grounding(*captions: str) -> Grounding:
    """An image for each caption, whose phrases are its words that have boxes."""
    phrases = [
        (number, Span(match.start(), match.end(), ""), NAMES[match[0]])
        for number, caption in enumerate(captions)
        for match in re.finditer(r"\w+", caption)
        if match[0] in NAMES
    ]
    game = PointingGame(
        FileImages([Path(f"{number}.png") for number in range(len(captions))]),
        [number for number, _, _ in phrases],
        [captions[number] for number, _, _ in phrases],
        [span for _, span, _ in phrases],
        [boxes for _, _, boxes in phrases],
    )
    return Grounding(game, [number for number, _, _ in phrases])


TWO_CAPTIONS = ("dog and chair and birds", "cup and dog and birds")


def gold_patches(image: int) -> torch.Tensor:
    """What a box holds has the direction of its phrase, and one of its own: two birds are birds, and differ."""
    patches = torch.zeros(GRID[0] * GRID[1], 16)
    own = len(NAMES)
    for number, (name, boxes) in enumerate(NAMES.items()):
        for box in boxes:
            inside = cells_in_boxes(torch.tensor([box]), GRID)[0].flatten()
            if name in TWO_CAPTIONS[image]:
                patches[inside, number] += 1
                patches[inside, own] += 1
            own += 1
    return patches + 1e-4


def gold_query(number: int, phrase: str) -> torch.Tensor:
    return torch.eye(16)[list(NAMES).index(phrase)]


def peaked(row: int, column: int) -> torch.Tensor:
    """Patches that are the more like the first direction, the nearer they are to one of them."""
    rows, columns = torch.meshgrid(*(torch.arange(size).double() for size in GRID), indexing="ij")
    angle = torch.hypot(rows - row, columns - column).flatten() / 10
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def test_a_model_whose_maps_are_the_gold_boxes_has_100_in_all_three():
    found = grounding(*TWO_CAPTIONS).score(KnownFeatures(gold_query, gold_patches))
    whole = found.parts[""]
    for way in ("words", "text"):
        assert whole[f"pointing_{way}"] == 1
        assert whole[f"swap_{way}"] == whole[f"swap_{way}_central_first"] == whole[f"swap_{way}_central_last"] == 1
        assert whole[f"swap_{way}_balanced"] == pytest.approx(1)
        for which in ("single", "several"):
            assert whole[f"set_f1_{way}_{which}"] == whole[f"set_exact_{way}_{which}"] == 1
            assert whole[f"set_f1_{way}_relative_{which}"] == whole[f"set_exact_{way}_relative_{which}"] == 1
        # One of two birds: precision 1, recall 1/2. Which of them is better cannot be told: the worst set, no bird, is
        # none of the best.
        assert whole[f"set_f1_{way}_best_box_single"] == 1
        assert whole[f"set_f1_{way}_best_box_several"] == pytest.approx(2 / 3)
        assert whole[f"set_exact_{way}_best_box_several"] == 0
        # Asked for the other image's phrases in order, only the birds, of which each image has some, are found.
        assert whole[f"pointing_{way}_other"] == pytest.approx(1 / 3)
    assert whole["set_f1_all_boxes_single"] == pytest.approx(2 / 5)  # four boxes in each image
    assert whole["set_f1_all_boxes_several"] == pytest.approx(4 / 6)
    assert found.counts == {"images": 2, "phrases": 6, "pairs": 6, "phrases with sets": 6}


def test_a_patch_that_prefers_every_phrase_hides_the_others_but_not_relative_to_the_other_phrases():
    everything = torch.eye(16)[15]

    def patches(image: int) -> torch.Tensor:
        found = gold_patches(image)
        outside = int(found.sum(1).argmin())
        found[outside] = 5 * everything
        return found

    embedder = KnownFeatures(lambda number, phrase: gold_query(number, phrase) + everything, patches)
    whole = grounding(*TWO_CAPTIONS).score(embedder).parts[""]
    for way in ("words", "text"):
        assert whole[f"pointing_{way}"] == whole[f"pointing_{way}_other"] == 0
        assert whole[f"pointing_{way}_relative"] == 1
        assert whole[f"swap_{way}"] == 1


def test_the_only_phrase_of_an_image_keeps_its_map():
    maps = torch.randn(4, *GRID)
    found = relative_maps(maps, torch.tensor([0, 2, 0, 3]))
    torch.testing.assert_close(found[[1, 3]], maps[[1, 3]])
    torch.testing.assert_close(found[[0, 2]].sum(0), torch.zeros(GRID))
    torch.testing.assert_close(found[0] - found[2], maps[0] - maps[2])


def test_a_map_that_ignores_its_phrase_has_50_in_swap():
    torch.manual_seed(0)
    patches = torch.randn(2, GRID[0] * GRID[1], 8)
    query = torch.randn(8)
    embedder = KnownFeatures(lambda number, phrase: query, patches.__getitem__)
    whole = grounding(*TWO_CAPTIONS).score(embedder).parts[""]
    swaps = {name: value for name, value in whole.items() if name.startswith("swap")}
    of_model = [value for name, value in swaps.items() if "_by_" not in name]
    assert len(of_model) == 8
    assert of_model == pytest.approx([0.5] * 8)
    assert whole["pointing_words"] == whole["pointing_words_other"]


def test_a_map_that_knows_only_the_middle_is_no_better_than_a_fixed_patch():
    middle = peaked(3, 3)
    embedder = KnownFeatures(lambda number, phrase: torch.tensor([1.0, 0.0]), lambda image: middle)
    task = grounding("dog and chair", "cup and dog", "dog and cup")
    whole = task.score(embedder).parts[""]
    # The dog, half of all phrases, is in the middle: far better than chance, and worth nothing.
    assert whole["pointing_words"] == whole["pointing_words_other"] == whole["pointing_fixed_patch"] == 0.5
    assert whole["pointing_chance"] < 0.2
    assert whole["swap_words"] == whole["swap_text"] == 0.5


def test_a_model_that_knows_only_the_order_of_phrases_is_told_apart():
    # The first phrase of a sentence means the middle, the others the corner.
    def query(number: int, phrase: str) -> torch.Tensor:
        return torch.tensor([1.0, 0.0]) if number % 2 == 0 else torch.tensor([0.0, 1.0])

    embedder = KnownFeatures(query, lambda image: peaked(3, 3))
    task = grounding("dog and chair", "dog and cup", "dog and chair", "cup and dog")
    whole = task.score(embedder).parts[""]
    assert whole["swap_words"] == 0.75
    assert (whole["swap_words_central_first"], whole["swap_words_central_last"]) == (1, 0)
    # Balanced, the dog is named first as often as last: the order is worth nothing.
    assert whole["swap_words_balanced"] == pytest.approx(0.5, abs=0.01)
    assert whole["swap_by_order"] == 0.75


def test_a_model_that_sees_only_the_length_of_a_phrase_is_told_apart():
    # The longer phrase of a sentence means the middle.
    def query(number: int, phrase: str) -> torch.Tensor:
        return torch.tensor([1.0, 0.0]) if len(phrase) > 3 else torch.tensor([0.0, 1.0])

    middle, cup = [(0.3, 0.3, 0.7, 0.7)], [CUP]
    task = grounding("dog and chair", "chair and dog", "dog and chair", "chair and dog")
    # In three of four sentences the chair, which is the longer word, stands in the middle.
    boxes = [cup, middle, middle, cup, cup, middle, cup, middle]
    task = replace(task, phrases=replace(task.phrases, boxes=boxes))
    whole = task.score(KnownFeatures(query, lambda image: peaked(3, 3))).parts[""]
    assert whole["swap_words"] == whole["swap_by_length"] == 0.75
    assert whole["swap_words_balanced"] == pytest.approx(0.5, abs=0.05)


def test_a_model_that_reads_only_the_first_phrase_of_a_sentence_has_50_in_swap():
    first = [text.split()[0] for text in TWO_CAPTIONS for _ in range(3)]
    embedder = KnownFeatures(lambda number, phrase: gold_query(number, first[number]), gold_patches)
    whole = grounding(*TWO_CAPTIONS).score(embedder).parts[""]
    assert [whole["swap_words"], whole["swap_words_balanced"]] == pytest.approx([0.5, 0.5])
    assert whole["pointing_words"] < 1
    assert whole["set_f1_words_single"] < 1


def test_balancing_weights_leave_nothing_to_a_bias_and_keep_what_is_balanced():
    torch.manual_seed(0)
    biased = torch.randn(400, 5, dtype=torch.double) + torch.tensor([0.5, 0, 0, -0.3, 0])
    weights = balancing_weights(biased)
    assert weights.sum() == pytest.approx(1)
    assert (weights @ biased).abs().max() < 1e-3
    assert biased.mean(0).abs().max() > 0.3
    mirrored = torch.cat([biased, -biased])
    assert balancing_weights(mirrored) == pytest.approx(torch.full((800,), 1 / 800))
    # What cannot be balanced does not break it.
    assert balancing_weights(torch.ones(3, 2, dtype=torch.double)) == pytest.approx(torch.full((3,), 1 / 3))


def test_only_phrases_of_one_caption_whose_boxes_lie_apart_are_swapped():
    task = grounding("cup and dog", "dog and dog", "chair")
    pairs, central = task.swap_pairs
    assert [[task.phrases.captions[t] for t in pair] for pair in pairs.tolist()] == [["cup and dog"] * 2]
    assert central.item() > 0  # the cup, which comes first, lies farther out
    whole = task.score(KnownFeatures(gold_query, lambda image: gold_patches(1))).parts[""]
    assert whole["swap_words_central_first"] is None


def test_images_with_one_box_or_too_many_have_no_sets():
    task = grounding("dog and dog", "cup and dog")
    game = task.phrases
    many = [(0.01 * number, 0.0, 1.0, 1.0) for number in range(13)]
    crowd = replace(task, phrases=replace(game, boxes=[game.boxes[0], game.boxes[1], many, [DOG]]))
    embedder = KnownFeatures(gold_query, lambda image: gold_patches(1))
    assert task.score(embedder).counts["phrases with sets"] == 2
    found = crowd.score(embedder)
    assert found.counts["phrases with sets"] == 0
    assert found.parts[""]["set_f1_words_single"] is None
