"""A grid of points: what the filters keep, and where the masks land on the image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from powerclip.annotate.segmenters import SegmenterImage, load_segmenter
from powerclip.annotate.segmenters.overlap import distinct, mask_iou
from powerclip.annotate.segmenters.points import Drawn, PointOptions, PointSegmenter, point_grid, stability, to_grid
from powerclip.data import mask_codec
from powerclip.data.mask_codec import GRID
from powerclip.errors import UserError


class Boxes(PointSegmenter):
    """Segments the coloured box under a point of an image that fills the left upper corner of a square of 64."""

    name, version = "boxes", "1"
    side = 64

    def __init__(self, at_once: int = 7, quality: float = 0.95, edge: float = 9.0, **options):
        super().__init__(PointOptions(**{"points": 8, **options}), {}, torch.device("cpu"), at_once)
        self._quality, self._edge, self.calls = quality, edge, 0

    def encode(self, images: Sequence[SegmenterImage]):
        square = torch.full((len(images), self.side, self.side), -1)
        extent = []
        for at, image in enumerate(images):
            height, width = image.pixels.shape[:2]
            square[at, :height, :width] = torch.from_numpy(image.pixels[..., 0].astype(np.int64))
            extent.append((width / self.side, height / self.side))
        return square, torch.tensor(extent)

    def decode(self, encoded, points):
        self.calls += 1
        cells = (points * self.side).long()
        colours = torch.stack([square[one[:, 1], one[:, 0]] for square, one in zip(encoded, cells, strict=True)])
        inside = encoded[:, None] == colours[..., None, None]
        whole = torch.where(inside, self._edge, -self._edge)
        logits = torch.stack([whole, torch.full_like(whole, 5.0), -whole], dim=2)  # the box, everything, the rest
        quality = torch.tensor([self._quality, 0.99, 0.2]).expand(*points.shape[:2], 3)
        owner = torch.arange(len(points)).repeat_interleave(points.shape[1])
        return Drawn(owner, logits.flatten(0, 1), quality.flatten(0, 1))


def image(height: int, width: int) -> SegmenterImage:
    """Four quarters of different colours, the last one with a small square."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, width // 2 :] = 1
    pixels[height // 2 :, : width // 2] = 2
    pixels[height // 2 :, width // 2 :] = 3
    return SegmenterImage(f"{height}x{width}", pixels)


def quarters() -> set[bytes]:
    masks = np.zeros((4, GRID, GRID), bool)
    half = GRID // 2
    masks[0, :half, :half] = masks[1, :half, half:] = masks[2, half:, :half] = masks[3, half:, half:] = True
    return {mask.tobytes() for mask in masks}


@pytest.mark.parametrize("size", [(64, 64), (32, 64), (64, 40), (16, 16)])
def test_each_part_of_an_image_is_found_once_wherever_it_lies_in_the_models_square(size):
    (masks,) = Boxes().segment([image(*size)])
    assert {mask.tobytes() for mask in masks} == quarters()
    assert len(masks) == 4


def test_images_of_a_batch_do_not_mix_and_batches_of_points_change_nothing():
    images = [image(64, 64), image(32, 64), image(64, 20)]
    alone = [Boxes(at_once=1000, points=4).segment([one])[0] for one in images]
    for at_once in (1, 10, 1000):
        segmenter = Boxes(at_once=at_once, points=4)
        for one, other in zip(segmenter.segment(images), alone, strict=True):
            np.testing.assert_array_equal(one, other)
    assert segmenter.calls == 1
    assert Boxes().segment([]) == []


def test_masks_that_the_model_doubts_that_are_unstable_too_small_or_too_large_are_left_out():
    whole = [image(64, 64)]
    assert len(Boxes(quality=0.87).segment(whole)[0]) == 0
    assert len(Boxes(edge=0.5).segment(whole)[0]) == 0  # a small change of the threshold would change all
    assert len(Boxes(smallest=0.3).segment(whole)[0]) == 0
    assert len(Boxes(largest=0.2).segment(whole)[0]) == 0
    assert len(Boxes(largest=1.0).segment(whole)[0]) == 5  # the whole image too
    assert len(Boxes(most=3).segment(whole)[0]) == 3


def test_the_best_masks_come_first():
    masks = Boxes(largest=1.0).segment([image(64, 64)])[0]
    assert masks[0].all()  # of which the model expects most


def test_points_lie_in_the_middle_of_equal_boxes():
    assert point_grid(2).tolist() == [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]


def test_stability_is_the_iou_of_two_thresholds():
    logits = torch.tensor([[[2.0, 2.0], [0.0, -2.0]], [[-5.0, -5.0], [-5.0, -5.0]]])
    torch.testing.assert_close(stability(logits), torch.tensor([2 / 3, 0.0]))


def test_masks_come_to_the_grid_as_the_codec_brings_them():
    masks = torch.rand(5, 128, 192, generator=torch.Generator().manual_seed(0)) < 0.5
    masks[0] = False
    masks[1] = False
    masks[1, 3, 100] = True  # a speck is kept
    expected = np.stack([mask_codec.to_grid(mask.numpy()) for mask in masks])
    np.testing.assert_array_equal(to_grid(masks).numpy(), expected)
    assert to_grid(masks)[1].sum() == 1


def test_of_masks_that_overlap_the_first_stays():
    masks = torch.zeros(4, 4, 4, dtype=torch.bool)
    masks[0, :2] = masks[1, :2, :3] = masks[2, 2:] = masks[3] = True
    torch.testing.assert_close(mask_iou(masks)[0], torch.tensor([1.0, 0.75, 0.0, 0.5]))
    assert len(distinct(masks, 0.7, 9)) == 3
    assert (distinct(masks, 0.7, 2) == masks[[0, 2]]).all()
    assert len(distinct(masks, 0.8, 9)) == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("superpixls", {}, "did you mean 'superpixels'"),
        ("mobile_sam", {"point": 3}, "did you mean 'points'"),
        ("mobile_sam", {"weights": "nowhere.pt", "points": 0}, "no weights file nowhere.pt"),
        ("superpixels", {"most": 0}, "most at least 1"),
        ("superpixels", {"smallest": 0.5, "largest": 0.1}, "in this order"),
        ("coco", {"points": 3}, "it takes none"),
        ("coco", {}, "give the file with the masks"),
    ],
)
def test_wrong_names_and_settings_are_one_clear_line(name, options, message):
    with pytest.raises(UserError, match=message):
        load_segmenter(name, "cpu", **options)


@pytest.mark.parametrize("options", [{"points": 0}, {"quality": 1.5}, {"most": 0}, {"overlap": -1}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(UserError, match="is not between"):
        PointOptions(**options)


def test_a_device_that_is_not_there_is_refused():
    for device, message in (("gpu", "--device: 'gpu' is not a device"), ("cuda", "--device: cuda is not there")):
        if device == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(UserError, match=message):
            load_segmenter("mobile_sam", device, "any.pt")
