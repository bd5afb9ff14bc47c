"""Batches from shards whose sidecars are missing, torn or of something else: counted, and something stands in."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import shard_examples
import torch
from shard_examples import block, caption_of, loader, sample, write_regions, write_samples, write_trees

from powerclip.data.trees import Span
from powerclip.errors import UserError


def with_trees(tmp_path: Path) -> tuple[Path, Path]:
    (path,) = write_samples(tmp_path, [4])
    return path, write_trees(path, {f"s{number:04d}": caption_of(f"s{number:04d}") for number in range(4)})


def trees_missing(tmp_path: Path, _: pytest.MonkeyPatch) -> Path:
    path, sidecar = with_trees(tmp_path)
    sidecar.unlink()
    return path


def trees_torn(tmp_path: Path, _: pytest.MonkeyPatch) -> Path:
    path, sidecar = with_trees(tmp_path)
    sidecar.write_bytes(sidecar.read_bytes()[:-20])
    return path


def trees_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    original = shard_examples.info
    monkeypatch.setattr(shard_examples, "info", lambda *arguments: replace(original(*arguments), format=99))
    return with_trees(tmp_path)[0]


def trees_without_the_key(tmp_path: Path, _: pytest.MonkeyPatch) -> Path:
    (path,) = write_samples(tmp_path, [4])
    write_trees(path, {"other": caption_of("other")})
    return path


def trees_of_another_caption(tmp_path: Path, _: pytest.MonkeyPatch) -> Path:
    (path,) = write_samples(tmp_path, [4])
    write_trees(path, {f"s{number:04d}": caption_of("edited since") for number in range(4)})
    return path


def trees_that_cross(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shard_examples, "spans_of", lambda caption: [Span(0, 13, "NP"), Span(6, 20, "VP")])
    return with_trees(tmp_path)[0]


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (trees_missing, "trees/no_sidecar"),
        (trees_torn, "trees/unusable_sidecar"),
        (trees_of_another_version, "trees/unusable_sidecar"),
        (trees_without_the_key, "trees/no_row"),
        (trees_of_another_caption, "trees/stale"),
        (trees_that_cross, "trees/broken"),
    ],
)
def test_a_caption_without_its_tree_is_one_phrase_and_counted(tmp_path, monkeypatch, make, fault):
    path = make(tmp_path, monkeypatch)
    said: list[str] = []
    batch = loader([path], trees=True, warn=said.append).batch(0)
    assert batch.phrases.node_offsets.diff().tolist() == [1, 1, 1, 1]
    assert batch.counts == {fault: 4, "flat_trees": 4}
    assert len(said) == 1
    assert "taken as one phrase" in said[0]
    with pytest.raises(UserError, match=fault):
        loader([path], trees=True, strict=True).batch(0)


def test_sidecars_may_lie_in_a_folder_of_their_own(tmp_path):
    (path,) = write_samples(tmp_path / "shards", [4])
    (tmp_path / "sidecars").mkdir()
    write_trees(path, {f"s{number:04d}": caption_of(f"s{number:04d}") for number in range(4)}, tmp_path / "sidecars")
    batch = loader([path], trees=True, sidecars=tmp_path / "sidecars").batch(0)
    assert batch.counts == {}
    assert [file.name for file in (tmp_path / "shards").iterdir()] == ["00000.tar"]  # the index is not here either


def regions_missing(path: Path, masks: dict, images: dict) -> None:
    pass


def regions_torn(path: Path, masks: dict, images: dict) -> None:
    sidecar = write_regions(path, masks, images)
    sidecar.write_bytes(b"")


def regions_without_the_key(path: Path, masks: dict, images: dict) -> None:
    write_regions(path, {"other": []}, {"other": b""})


def regions_of_another_image(path: Path, masks: dict, images: dict) -> None:
    write_regions(path, masks, dict.fromkeys(images, b"another"))
    os.utime(path, ns=(0, 0))  # the tar was written again; while it is unchanged, its images are not compared


def regions_broken(path: Path, masks: dict, images: dict) -> None:
    packed, shard_examples.pack_mask = shard_examples.pack_mask, lambda mask: b"?"
    try:
        write_regions(path, masks, images)
    finally:
        shard_examples.pack_mask = packed


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (regions_missing, "regions/no_sidecar"),
        (regions_torn, "regions/unusable_sidecar"),
        (regions_without_the_key, "regions/no_row"),
        (regions_of_another_image, "regions/stale"),
        (regions_broken, "regions/broken"),
    ],
)
def test_an_image_without_its_masks_gets_random_boxes_and_is_counted(tmp_path, make, fault):
    (path,) = write_samples(tmp_path, [4])
    names = [f"s{number:04d}" for number in range(4)]
    make(path, {key: [block(0, 0, 1, 1)] for key in names}, {key: dict(sample(key))[f"{key}.png"] for key in names})
    said: list[str] = []
    batch = loader([path], segments=True, regions=3, warn=said.append).batch(0)
    assert torch.equal(batch.regions, loader([path], regions=3).batch(0).regions)
    assert batch.counts == {fault: 4, "topped_up": 12}
    assert "random boxes" in said[0]
    with pytest.raises(UserError, match=fault):
        loader([path], segments=True, strict=True).batch(0)


def test_images_that_did_not_change_keep_their_masks_when_their_tar_is_written_anew(tmp_path):
    (path,) = write_samples(tmp_path, [4])
    names = [f"s{number:04d}" for number in range(4)]
    images = {key: dict(sample(key))[f"{key}.png"] for key in names}
    write_regions(path, {key: [block(0, 0, 1, 1)] for key in names}, images)
    os.utime(path, ns=(0, 0))
    assert loader([path], segments=True, regions=1).batch(0).counts == {}
