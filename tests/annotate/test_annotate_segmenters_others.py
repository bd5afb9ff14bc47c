"""Regions without a network: superpixels, and masks from a COCO file. And images of every sort as pixels."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from annotate_examples import photo
from PIL import Image
from pycocotools import mask as coco

from powerclip.annotate.segmenters import SegmenterImage, load_segmenter
from powerclip.data.decode import decode_rgb
from powerclip.data.mask_codec import GRID, to_grid
from powerclip.errors import UserError


def iou(one: np.ndarray, other: np.ndarray) -> float:
    return (one & other).sum() / (one | other).sum()


def test_superpixels_find_a_disc_and_what_is_around_it():
    rows, columns = np.mgrid[:120, :160]
    disc = (rows - 60) ** 2 + (columns - 50) ** 2 < 35**2
    pixels = np.where(disc[..., None], np.uint8((200, 30, 30)), np.uint8((20, 40, 180)))
    (masks,) = load_segmenter("superpixels").segment([SegmenterImage("one", pixels)])
    assert masks.shape[1:] == (GRID, GRID)
    assert max(iou(mask, to_grid(disc)) for mask in masks) > 0.85
    assert max(iou(mask, to_grid(~disc)) for mask in masks) > 0.9
    sizes = masks.sum((1, 2))
    assert (np.diff(sizes.astype(int)) <= 0).all()  # the largest first


def test_superpixels_are_distinct_few_and_neither_tiny_nor_the_whole_image():
    pixels = decode_rgb(photo(1, (400, 300)))
    masks = load_segmenter("superpixels", most=6, smallest=0.02, largest=0.5).segment([SegmenterImage("one", pixels)])[
        0
    ]
    assert 1 <= len(masks) <= 6
    assert masks.mean((1, 2)).max() <= 0.51
    assert masks.mean((1, 2)).min() >= 0.01
    for at in range(len(masks)):
        assert all(iou(masks[at], other) <= 0.7 for other in masks[:at])


def test_an_even_image_has_no_superpixels():
    even = SegmenterImage("even", np.full((40, 60, 3), 127, np.uint8))
    assert load_segmenter("superpixels").segment([even])[0].shape == (0, GRID, GRID)


# ---- COCO ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def coco_file(tmp_path):
    """Two images: a box as polygon and as both kinds of run lengths; and one without a mask."""
    box = np.zeros((80, 100), np.uint8)
    box[20:60, 50:90] = 1
    packed = coco.encode(np.asfortranarray(box))
    counts = [20 + 50 * 80]  # down the columns, zeros first
    for _ in range(39):
        counts += [40, 40]
    counts += [40, 20 + 10 * 80]
    content = {
        "images": [
            {"id": 12, "file_name": "train/000000000012.jpg", "height": 80, "width": 100},
            {"id": 7, "file_name": "a-name.png", "height": 80, "width": 100},
        ],
        "annotations": [
            {"image_id": 12, "segmentation": [[50, 20, 90, 20, 90, 60, 50, 60]]},
            {"image_id": 12, "segmentation": {"size": [80, 100], "counts": packed["counts"].decode()}},
            {"image_id": 12, "segmentation": {"size": [80, 100], "counts": counts}},
            {"image_id": 12, "segmentation": [[1, 2, 3, 4]]},
            {"image_id": 7},
        ],
    }
    path = tmp_path / "masks.json"
    path.write_text(json.dumps(content))
    return path, to_grid(box.astype(bool))


def test_polygons_and_run_lengths_become_the_same_mask(coco_file):
    path, expected = coco_file
    segmenter = load_segmenter("coco", weights=str(path))
    blank = np.zeros((8, 10, 3), np.uint8)
    by_name, by_id, without, unknown = segmenter.segment(
        [SegmenterImage(key, blank) for key in ("000000000012", "12", "a-name", "13")]
    )
    assert len(by_name) == 3
    assert all(iou(mask, expected) > 0.95 for mask in by_name)
    np.testing.assert_array_equal(by_name, by_id)
    assert len(without) == len(unknown) == 0


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"images": [{"id": 1}], "annotations": []}'])
def test_a_file_that_is_not_cocos_is_one_clear_line(tmp_path, content):
    (tmp_path / "masks.json").write_text(content)
    with pytest.raises(UserError, match=r"masks\.json is no COCO file"):
        load_segmenter("coco", weights=str(tmp_path / "masks.json"))
    with pytest.raises(UserError, match="no file"):
        load_segmenter("coco", weights=str(tmp_path / "gone.json"))


# ---- images --------------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "1", "P", "RGBA", "LA", "I;16"])
def test_an_image_of_any_mode_becomes_rgb(mode):
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 30), 65535, np.uint16))
    else:
        image = Image.new("RGB", (30, 20), "white").convert(mode)
    data = encoded(image, "tiff" if mode == "CMYK" else "png")
    pixels = decode_rgb(data)
    assert pixels.shape == (20, 30, 3)
    assert pixels.dtype == np.uint8
    assert pixels.min() >= 250


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    pixels = decode_rgb(encoded(frames[0], "gif", save_all=True, append_images=frames[1:]))
    assert (pixels[0, 0] == (255, 0, 0)).all()


def test_a_large_image_is_brought_to_what_segmenters_use_in_its_own_shape():
    assert decode_rgb(photo(0, (3000, 1500))).shape == (512, 1024, 3)
    assert decode_rgb(photo(0, (300, 150))).shape == (150, 300, 3)
    assert decode_rgb(encoded(Image.new("RGB", (5000, 1)), "png")).shape == (1, 1024, 3)


def test_what_is_no_image_is_none(monkeypatch):
    whole = photo()
    for data in (b"", b"text", whole[:100], whole[: len(whole) // 2]):
        assert decode_rgb(data) is None
    monkeypatch.setattr("powerclip.data.decode.MOST_PIXELS", 100)
    assert decode_rgb(whole) is None
