"""Stored masks of a corpus: the regions that shards would have, a batch at once, and boxes for what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mini_corpus import write_shard
from PIL import Image
from shard_examples import TOKENIZER, block, encoded, info, ramp, sample, write_regions, write_samples

from powerclip.alignment.regions import boxes_of, random_boxes
from powerclip.annotate.writer import RegionRows, write_sidecar
from powerclip.data.batch import BatchSpec
from powerclip.data.captions import content_hash
from powerclip.data.corpus import Corpus, read_corpus
from powerclip.data.corpus_loader import CorpusLoader, pack_corpus
from powerclip.data.crops import crop_boxes
from powerclip.data.keyed_random import Draw, keys_of
from powerclip.data.loader import box_draws
from powerclip.data.mask_codec import GRID, pack_mask
from powerclip.data.masks import (
    BROKEN,
    NO_MASK,
    NO_ROW,
    STALE,
    CorpusMasks,
    choose_regions,
    crop_masks,
    read_masks,
)
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD
from powerclip.data.sidecar import SidecarError, sidecar_path
from powerclip.runtime.distributed import SINGLE, Ranks

COUNTS = [3, 0, 7, 12, 1, 9, 5, 12]  # masks of each image
IMAGES = {f"s{number:04d}": encoded(ramp(24, 18, number)) for number in range(len(COUNTS))}


def ellipses(count: int, seed: int) -> list[np.ndarray]:
    """Masks of all sizes, some of them at the edge of the image."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:GRID, :GRID]
    masks = []
    for _ in range(count):
        (y, x), (height, width) = rng.uniform(0, GRID, 2), rng.uniform(2, GRID / 2, 2)
        masks.append(((rows - y) / height) ** 2 + ((columns - x) / width) ** 2 < 1)
    return masks


MASKS = {key: ellipses(count, seed) for seed, (key, count) in enumerate(zip(IMAGES, COUNTS, strict=True))}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[Path]:
    """Two shards with the masks of all images beside them."""
    paths = write_samples(tmp_path_factory.mktemp("shards"), [5, 3])
    for path, keys in zip(paths, (list(MASKS)[:5], list(MASKS)[5:]), strict=True):
        write_regions(path, {key: MASKS[key] for key in keys}, IMAGES)
    return paths


@pytest.fixture(scope="module")
def corpus(shards) -> Corpus:
    return read_corpus(shards, 20)


@pytest.fixture(scope="module")
def masks(corpus) -> CorpusMasks:
    return read_masks(corpus)


SPEC = {"image_size": (16, 16), "grid": (4, 4), "batch_size": 8, "regions": 5, "crop": 0.3}


def loader(corpus: Corpus, masks: CorpusMasks | None, ranks: Ranks = SINGLE, **options: object) -> CorpusLoader:
    spec = BatchSpec(**SPEC | options)
    return CorpusLoader(pack_corpus(corpus, TOKENIZER), spec, masks, ranks)


def cover_of(mask: np.ndarray, crop: torch.Tensor, grid: tuple[int, int]) -> np.ndarray:
    """How much of each patch of a crop a mask covers."""
    (left, top, right, bottom), cells = crop.tolist(), np.arange(GRID)

    def overlap(start: float, end: float, count: int) -> np.ndarray:
        """The literal version: how much of each cell of the mask lies in each of `count` equal parts."""
        edges = np.linspace(start, end, count + 1) * GRID
        lengths = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
        return lengths.clip(0) / (edges[1] - edges[0])

    return (overlap(top, bottom, grid[0]) @ mask @ overlap(left, right, grid[1]).T).ravel().round(6)


@pytest.mark.parametrize("smallest", [0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("grid", "count"), [((7, 5), 4), ((4, 4), 15)])
def test_regions_are_those_of_the_masks_that_the_crop_shows_and_boxes_for_the_rest(masks, smallest, grid, count):
    generator = torch.Generator().manual_seed(3)
    images = torch.randperm(8, generator=generator).repeat(5)
    crops = crop_boxes(torch.rand(40, 4, generator=generator), smallest)
    boxes = random_boxes(40, count, grid, generator)
    draws = torch.rand(40, masks.most, generator=generator)
    selected = masks.choose(images, crops, draws, boxes, grid)
    assert selected.shape == boxes.shape
    hidden = 0
    for number, crop, draw, box, regions in zip(images.tolist(), crops, draws, boxes, selected, strict=True):
        covers = [cover_of(mask, crop, grid) for mask in list(MASKS.values())[number]]
        shown = [at for at, cover in enumerate(covers) if cover.any()]
        hidden += len(covers) - len(shown)
        drawn = sorted(shown, key=draw.tolist().__getitem__)[:count]
        for at, region in zip(drawn, regions, strict=False):
            enough = min(0.5, covers[at].max())
            sure = abs(covers[at] - enough) > 1e-5  # two patches of the same cover are not the same to the last digit
            assert np.array_equal(region[sure], (covers[at] > enough)[sure])
            assert region.any()
        assert torch.equal(regions[len(drawn) :], box[len(drawn) :])
    assert (hidden > 0) == (smallest < 0.5)


def test_all_masks_of_an_image_are_the_regions_that_shards_would_have(masks):
    # The edges of the patches are those of cells, so that nothing is rounded, here or there.
    box = (0.375, 0.125, 0.875, 0.625)
    crop = torch.tensor([box])
    for number, listed in enumerate(MASKS.values()):
        (expected,) = choose_regions([[pack_mask(mask) for mask in listed]], crop.double(), 12, (4, 8))
        none = torch.zeros(1, 12, 32, dtype=torch.bool)
        (regions,) = masks.choose(torch.tensor([number]), crop, torch.rand(1, masks.most), none, (4, 8))
        assert sorted(regions[regions.any(-1)].tolist()) == sorted(expected.tolist())


def test_masks_are_drawn_without_repetition_and_all_in_time():
    strips = np.stack([block(column / 8, 0, (column + 1) / 8, 1) for column in range(8)])
    bits = torch.from_numpy(np.packbits(np.concatenate([strips, np.zeros((1, GRID, GRID), np.bool_)]), axis=-1))
    masks = CorpusMasks(bits, torch.tensor([0]), torch.tensor([8]), 8)
    draws = torch.rand(500, 8, generator=torch.Generator().manual_seed(0))
    whole, none = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(500, 4), torch.zeros(500, 3, 8, dtype=torch.bool)
    drawn = masks.choose(torch.zeros(500, dtype=torch.long), whole, draws, none, (1, 8))
    assert (drawn.sum(-1) == 1).all()
    assert (drawn.sum(1) <= 1).all()
    share = drawn.float().mean((0, 1))
    assert ((share - 1 / 8).abs() < 0.03).all()


def test_a_mask_too_small_for_any_patch_is_the_patch_that_it_covers_most():
    small, whole = torch.from_numpy(block(0.3, 0.6, 0.35, 0.65)), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert crop_masks(small[None, None], whole, (2, 2)).tolist() == [[[False, False, True, False]]]
    right = torch.tensor([[0.5, 0.0, 1.0, 1.0]])
    assert not crop_masks(small[None, None], right, (2, 2)).any()


def test_a_mask_drawn_on_the_image_lands_on_the_same_pixels_after_the_crop(tmp_path):
    # White where the one mask of an image is: a region's patches are white in the batch, the others black.
    shapes = {f"s{number}": ellipses(1, 100 + number)[0] for number in range(12)}
    images = {key: encoded(Image.fromarray(mask.astype(np.uint8) * 255)) for key, mask in shapes.items()}
    shard = write_shard(tmp_path / "a.tar", [part for key in shapes for part in sample(key, images[key])])
    write_regions(shard, {key: [mask] for key, mask in shapes.items()}, images)
    corpus = read_corpus([shard], GRID)
    made = loader(corpus, read_masks(corpus), batch_size=12, image_size=(56, 40), grid=(7, 5), regions=1)
    compared = 0
    for step in range(4):
        batch = made.batch(step)
        pixels = batch.images[:, 0] * CLIP_STD[0] + CLIP_MEAN[0]
        seen = pixels.unfold(1, 8, 8).unfold(2, 8, 8).mean((3, 4)).flatten(1)
        for cover, region in zip(seen, batch.regions[:, 0], strict=True):
            if cover.max() > 0.6:  # else it is the most covered patch, or a box
                sure = (cover - 0.5).abs() > 0.08
                assert torch.equal(region[sure], (cover > 0.5)[sure])
                compared += 1
    assert compared > 30


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_masks_change_nothing_but_regions_and_images_without_keep_their_boxes(corpus, masks):
    plain, masked = loader(corpus, None).batch(3), loader(corpus, masks).batch(3)
    assert torch.equal(plain.images, masked.images)
    assert torch.equal(plain.tokens, masked.tokens)
    assert plain.keys == masked.keys
    bare = plain.keys.index("s0001")
    assert torch.equal(plain.regions[bare], masked.regions[bare])
    assert not torch.equal(plain.regions, masked.regions)


def test_boxes_are_those_of_the_seed_the_epoch_and_the_image(corpus):
    batch = loader(corpus, None, augment_seed=7, largest_box=0.6).batch(3)  # one batch is an epoch
    images = np.array([corpus.keys.index(key) for key in batch.keys])
    expected = boxes_of(box_draws(keys_of(7, 3, images, Draw.BOXES), 5), (4, 4), 0.6)
    assert torch.equal(batch.regions, expected)


def test_the_same_seeds_and_step_choose_the_same_masks_and_others_others(corpus, masks):
    one, again = (loader(corpus, masks).batch(2).regions for _ in range(2))
    assert torch.equal(one, again)
    # Whole images, of which each has masks enough: nothing but the choice differs.
    many = CorpusMasks(masks.bits, masks.first[[3] * 8], masks.counts[[3] * 8], masks.most)
    batches = [loader(corpus, many, crop=1.0, augment_seed=seed).batch(step) for seed, step in ((0, 0), (1, 0), (0, 1))]
    assert len({batch.regions.numpy().tobytes() for batch in batches}) == 3


@pytest.mark.parametrize("sort", [False, True])
def test_an_image_has_the_same_regions_on_any_number_of_ranks(corpus, masks, sort):
    whole = loader(corpus, masks, sort_by_length=sort).batch(1)
    known = dict(zip(whole.keys, whole.regions, strict=True))
    for count in (2, 4):
        parts = [loader(corpus, masks, Ranks(rank, count), sort_by_length=sort).batch(1) for rank in range(count)]
        pairs = [pair for part in parts for pair in zip(part.keys, part.regions, strict=True)]
        assert len(pairs) == 8
        assert all(torch.equal(regions, known[key]) for key, regions in pairs)


def test_how_many_masks_are_unpacked_at_once_changes_nothing(corpus, masks, monkeypatch):
    expected = loader(corpus, masks).batch(0).regions
    monkeypatch.setattr("powerclip.data.masks._AT_ONCE", 3 * masks.most)
    assert torch.equal(loader(corpus, masks).batch(0).regions, expected)


# ---- sidecars --------------------------------------------------------------------------------------------------------


def test_masks_come_back_as_they_were_stored(corpus, masks):
    assert corpus.keys == list(MASKS)
    assert masks.counts.tolist() == COUNTS
    assert (masks.most, masks.fallbacks) == (12, {NO_MASK: 1})
    assert masks.summary() == "49 masks of 7 images (1 images without a mask, with random boxes)"
    bits = np.unpackbits(masks.bits.numpy(), axis=-1)
    assert np.array_equal(bits[:-1], [mask for listed in MASKS.values() for mask in listed])
    assert not bits[-1].any()


def test_what_is_missing_stale_or_broken_is_counted_and_gets_boxes(tmp_path):
    first, second = write_samples(tmp_path, [5, 3])
    side = tmp_path / "side"
    side.mkdir()
    rows = RegionRows()
    fine = pack_mask(block(0, 0, 0.5, 1))
    listed = {"s0000": [fine], "s0001": [fine], "s0003": [], "s0004": [fine, b"?"]}
    for key, packed in listed.items():
        rows.key.append(key)
        rows.image.append(content_hash(b"another" if key == "s0001" else IMAGES[key]))
        rows.masks.append(packed)
        rows.fallback.append(None)
    write_sidecar(sidecar_path(first, "regions", side), info("regions", first, 4), rows)
    corpus = read_corpus([first, second], 20)
    masks = read_masks(corpus, side)
    assert masks.fallbacks == {STALE: 1, NO_ROW: 1 + 3, NO_MASK: 1, BROKEN: 1}
    assert masks.counts.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    plain, masked = (loader(corpus, stored, crop=1.0, grid=(1, 2)).batch(0) for stored in (None, masks))
    for key, boxes, regions in zip(plain.keys, plain.regions, masked.regions, strict=True):
        count = 1 if key == "s0000" else 0
        assert regions[:count].tolist() == [[True, False]] * count
        assert torch.equal(regions[count:], boxes[count:])


def test_a_corpus_of_which_no_image_has_masks_has_boxes(tmp_path):
    (shard,) = write_samples(tmp_path, [4])
    corpus = read_corpus([shard], 20)
    masks = read_masks(corpus)
    assert (masks.most, masks.fallbacks) == (0, {NO_ROW: 4})
    plain, masked = (loader(corpus, stored, batch_size=4).batch(0) for stored in (None, masks))
    assert torch.equal(plain.regions, masked.regions)


def test_a_torn_sidecar_is_refused_by_name(tmp_path):
    (shard,) = write_samples(tmp_path, [2])
    path = write_regions(shard, {key: MASKS[key] for key in ("s0000", "s0001")}, IMAGES)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SidecarError, match=r"00000\.regions\.parquet cannot be read: .*; annotate its shard again"):
        read_masks(read_corpus([shard], 20))
