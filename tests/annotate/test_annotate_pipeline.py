"""From a tar to its sidecar: everything once, nothing again without a reason, and no tar that stops the rest."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
from annotate_examples import LONG, WordParser, make_shard, photo
from mini_corpus import write_shard

from powerclip.annotate.pipeline import State
from powerclip.annotate.region_annotator import FAILED, NO_REGION, NOT_READABLE, RegionAnnotator
from powerclip.annotate.segmenters.base import no_masks
from powerclip.annotate.segmenters.superpixels import Superpixels
from powerclip.annotate.tree_annotator import TreeAnnotator
from powerclip.data.mask_codec import GRID
from powerclip.data.sidecar import Miss, read_info, read_regions, read_trees
from powerclip.errors import UserError

CAPTIONS = [["a dog", "two dogs"], [LONG], ["a cat"]]


def sidecar(shard: Path, kind: str = "trees") -> Path:
    return shard.with_suffix(f".{kind}.parquet")


def test_every_caption_of_a_shard_gets_its_phrases(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    result = TreeAnnotator(WordParser()).annotate(str(shard))
    assert (result.state, result.samples, result.items) == (State.NEW, 3, 4)
    assert result.fallbacks == {"too long": 1}
    trees = read_trees(sidecar(shard))
    assert trees.keys == ["00000", "00001", "00002"]
    assert trees.spans("00000", "two dogs") == WordParser().parse(["two dogs"])[0].spans
    assert trees.fallback("00001", LONG) == "too long"
    assert trees.info.fallbacks == {"too long": 1}
    assert (trees.info.samples, trees.info.items, trees.info.phrases) == (3, 4, 10)


def test_a_second_run_asks_for_nothing_and_leaves_the_file_alone(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    TreeAnnotator(WordParser()).annotate(str(shard))
    before = sidecar(shard).stat()
    parser = WordParser()
    result = TreeAnnotator(parser).annotate(str(shard))
    assert (result.state, result.samples, parser.asked) == (State.DONE, 3, [])
    assert sidecar(shard).stat().st_mtime_ns == before.st_mtime_ns


def test_another_version_does_everything_again(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    TreeAnnotator(WordParser()).annotate(str(shard))
    parser = WordParser(version="2")
    result = TreeAnnotator(parser).annotate(str(shard))
    assert (result.state, result.reason, result.kept) == (State.REDONE, "made by words 1", 0)
    assert len(parser.asked) == 4
    assert read_info(sidecar(shard)).annotator.version == "2"


def test_when_a_caption_changes_only_that_caption_is_parsed(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    TreeAnnotator(WordParser()).annotate(str(shard))
    make_shard(shard, [["a dog", "three dogs"], [LONG], ["a cat"]])
    parser = WordParser()
    result = TreeAnnotator(parser).annotate(str(shard))
    assert (result.state, result.reason, result.kept) == (State.REDONE, "tar changed", 2)
    assert parser.asked == ["three dogs"]
    trees = read_trees(sidecar(shard))
    assert trees.spans("00000", "two dogs") is Miss.STALE
    assert trees.fallback("00001", LONG) == "too long"


def test_a_redone_shard_equals_one_that_was_annotated_afresh(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    TreeAnnotator(WordParser()).annotate(str(shard))
    make_shard(shard, [["a dog"], ["new"], ["a cat"], ["another"]])
    TreeAnnotator(WordParser()).annotate(str(shard))
    redone = sidecar(shard).read_bytes()
    sidecar(shard).unlink()
    TreeAnnotator(WordParser()).annotate(str(shard))
    assert sidecar(shard).read_bytes() == redone


def test_a_tar_that_was_merely_copied_is_done_already(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    TreeAnnotator(WordParser()).annotate(str(shard))
    os.utime(shard, ns=(1, 1))
    parser = WordParser()
    assert TreeAnnotator(parser).annotate(str(shard)).state is State.DONE
    assert parser.asked == []
    assert read_info(sidecar(shard)).fingerprint.endswith(":1")


def test_a_sample_that_lost_a_caption_is_not_kept(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    TreeAnnotator(WordParser()).annotate(str(shard))
    make_shard(shard, [["a dog"], [LONG], ["a cat"]])
    result = TreeAnnotator(WordParser()).annotate(str(shard))
    assert (result.state, result.kept) == (State.REDONE, 2)
    assert read_trees(sidecar(shard)).spans("00000", "two dogs") is Miss.STALE


def test_a_torn_sidecar_is_made_again(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    TreeAnnotator(WordParser()).annotate(str(shard))
    whole = sidecar(shard).read_bytes()
    for size in (0, 10, len(whole) - 3):
        sidecar(shard).write_bytes(whole[:size])
        result = TreeAnnotator(WordParser()).annotate(str(shard))
        assert (result.state, result.reason) == (State.REDONE, "sidecar torn or of another format")
        assert sidecar(shard).read_bytes() == whole


def test_a_missing_an_empty_and_a_wrong_tar_are_results(tmp_path):
    (tmp_path / "empty.tar").touch()
    (tmp_path / "wrong.tar").write_bytes(b"this is no tar" * 100)
    write_shard(tmp_path / "bare.tar", [("1.jpg", photo()), ("2.txt", "no image")])
    annotator = TreeAnnotator(WordParser())
    results = [annotator.annotate(str(tmp_path / f"{name}.tar")) for name in ("gone", "empty", "wrong", "bare")]
    assert {result.state for result in results} == {State.FAILED}
    assert [result.reason for result in results[:3]] == ["missing", "empty file", "not a tar"]
    assert "no caption" in str(results[3].reason)
    assert not list(tmp_path.glob("*.parquet"))


def test_a_torn_tar_is_annotated_up_to_the_cut_and_completed_later(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    result = TreeAnnotator(WordParser()).annotate(str(shard))
    assert (result.state, result.damage) == (State.NEW, "cut off")
    assert 0 < result.samples < 3
    assert read_info(sidecar(shard)).damage == "cut off"
    shard.write_bytes(whole)
    parser = WordParser()
    again = TreeAnnotator(parser).annotate(str(shard))
    assert (again.state, again.kept, again.damage) == (State.REDONE, result.samples, None)
    assert len(read_trees(sidecar(shard))) == 3


def test_captions_that_are_blank_binary_or_absent_stop_nothing(tmp_path):
    image = photo()
    members = []
    contents = {"a": b"", "b": b"\xff\x00\xfe", "c": b"   ", "d": "日本語 🐕".encode(), "e": b"a\r\ndog"}
    for key, content in contents.items():
        members += [(f"{key}.jpg", image), (f"{key}.txt", content)]
    members += [("f.jpg", image), ("f.json", b"{"), ("f.txt", b"from the second file")]
    shard = write_shard(tmp_path / "0.tar", members)
    result = TreeAnnotator(WordParser()).annotate(str(shard))
    trees = read_trees(sidecar(shard))
    assert result.samples == len(trees) == 5  # an empty file is no caption file
    assert trees.hashes("c") == []
    assert not isinstance(trees.spans("d", "日本語 🐕"), Miss)
    assert not isinstance(trees.spans("f", "from the second file"), Miss)
    assert trees.info.left_out == {"no caption": 1}


def test_shards_behind_a_url_are_annotated_into_a_folder(tmp_path):
    system = fsspec.filesystem("memory")
    system.pipe("/corpus/0.tar", make_shard(tmp_path / "0.tar", CAPTIONS).read_bytes())
    annotator = TreeAnnotator(WordParser(), tmp_path / "side")
    assert annotator.annotate("memory://corpus/0.tar").state is State.NEW
    assert annotator.annotate("memory://corpus/0.tar").state is State.DONE
    assert annotator.annotate("memory://corpus/1.tar").reason == "missing"
    assert read_trees(tmp_path / "side" / "0.trees.parquet").spans("00002", "a cat") is not None


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"0\.trees\.parquet cannot be written"):
        TreeAnnotator(WordParser(), tmp_path / "file").annotate(str(shard))


def test_progress_counts_every_sample_once(tmp_path):
    shard = make_shard(tmp_path / "0.tar", [["a dog"]] * 7)
    annotator = TreeAnnotator(WordParser())
    annotator.batch = 3
    seen: list[tuple[int, int]] = []
    annotator.annotate(str(shard), lambda done, of: seen.append((done, of)))
    assert seen == [(3, 7), (3, 7), (1, 7)]


# ---- regions ---------------------------------------------------------------------------------------------------------


class Stripes:
    """Finds the upper half of every image; fails on some and finds nothing in others."""

    name, version = "stripes", "1"
    options: dict = {}  # noqa: RUF012

    def __init__(self, failing: str = "", blind: str = ""):
        self.failing, self.blind, self.asked = failing, blind, []

    def segment(self, images):
        if any(image.key == self.failing for image in images) or self.failing == "all":
            raise RuntimeError("out of memory")
        self.asked += [image.key for image in images]
        half = np.zeros((1, GRID, GRID), bool)
        half[:, : GRID // 2] = True
        return [no_masks() if image.key == self.blind else half for image in images]


class Submitted(Stripes):
    """The same, while its caller goes on."""

    def __init__(self, broken: str = "", **options: str):
        super().__init__(**options)
        self.broken, self.events = broken, []

    def submit(self, images):
        keys = [image.key for image in images]
        self.events.append(("begun", keys))

        def collect():
            self.events.append(("fetched", keys))
            if self.broken in keys:
                raise RuntimeError("lost on the way")
            return self.segment(images)

        return collect


def test_a_batch_is_begun_before_the_masks_of_the_last_one_are_fetched(tmp_path):
    captions = [["a"]] * 5
    shard, other = make_shard(tmp_path / "0.tar", captions), make_shard(tmp_path / "1.tar", captions)
    segmenter = Submitted()
    RegionAnnotator(segmenter, batch=2).annotate(str(shard))
    first, second, third = [keys for event, keys in segmenter.events if event == "begun"]
    assert [len(part) for part in (first, second, third)] == [2, 2, 1]
    begun, fetched = [("begun", part) for part in (first, second, third)], [("fetched", first), ("fetched", second)]
    expected = [begun[0], begun[1], fetched[0], begun[2], fetched[1], ("fetched", third)]
    assert segmenter.events == expected
    RegionAnnotator(Stripes(), batch=2).annotate(str(other))
    one, two = (read_regions(sidecar(tar, "regions")) for tar in (shard, other))
    assert all((one.masks(key) == two.masks(key)).all() for part in (first, second, third) for key in part)


def test_what_is_lost_on_the_way_is_segmented_again_image_by_image(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    segmenter = Submitted(broken="00002")
    result = RegionAnnotator(segmenter, batch=2).annotate(str(shard))
    assert (result.items, result.fallbacks) == (3, {})


def test_every_image_gets_its_masks_and_what_has_none_a_reason(tmp_path):
    members = []
    for key, data in {"good": photo(), "torn": photo()[:200], "wrong": b"no image", "blind": photo(1)}.items():
        members += [(f"{key}.jpg", data), (f"{key}.txt", "a caption")]
    shard = write_shard(tmp_path / "0.tar", members)
    result = RegionAnnotator(Stripes(blind="blind"), batch=2).annotate(str(shard))
    assert (result.samples, result.items) == (4, 1)
    assert result.fallbacks == {NOT_READABLE: 2, NO_REGION: 1}
    regions = read_regions(sidecar(shard, "regions"))
    assert regions.masks("good", photo())[0, : GRID // 2].all()
    assert not regions.masks("good")[0, GRID // 2 :].any()
    assert regions.fallback("torn") == NOT_READABLE


def test_an_image_that_a_segmenter_fails_on_does_not_take_the_others_along(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    result = RegionAnnotator(Stripes(failing="00001"), batch=3).annotate(str(shard))
    assert (result.items, result.fallbacks) == (2, {FAILED: 1})


def test_a_segmenter_that_always_fails_is_an_error_not_a_fallback(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    with pytest.raises(RuntimeError, match="out of memory"):
        RegionAnnotator(Stripes(failing="all"), batch=3).annotate(str(shard))
    assert not sidecar(shard, "regions").exists()


def test_only_images_that_changed_are_segmented_again(tmp_path):
    captions = ["one"], ["two"], ["three"]
    shard = make_shard(tmp_path / "0.tar", captions)
    RegionAnnotator(Stripes()).annotate(str(shard))
    other = make_shard(tmp_path / "1.tar", captions, first=1)  # other images under keys 1, 2, 3
    os.replace(other, shard)
    stripes = Stripes()
    result = RegionAnnotator(stripes).annotate(str(shard))
    assert (result.state, result.kept, stripes.asked) == (State.REDONE, 2, ["00003"])


def test_other_settings_make_regions_stale(tmp_path):
    shard = make_shard(tmp_path / "0.tar", [["a"]])
    RegionAnnotator(Superpixels(most=4)).annotate(str(shard))
    assert RegionAnnotator(Superpixels(most=4)).annotate(str(shard)).state is State.DONE
    result = RegionAnnotator(Superpixels(most=3)).annotate(str(shard))
    assert (result.state, result.reason) == (State.REDONE, "made by superpixels 1")


def test_trees_and_regions_are_two_files_that_do_not_meet(tmp_path):
    shard = make_shard(tmp_path / "0.tar", CAPTIONS)
    RegionAnnotator(Stripes()).annotate(str(shard))
    before = sidecar(shard, "regions").read_bytes()
    TreeAnnotator(WordParser()).annotate(str(shard))
    assert sidecar(shard, "regions").read_bytes() == before


def test_captions_are_read_from_the_first_file_that_has_any(tmp_path):
    from powerclip.data.tar_index import make_index, sample_captions

    members = [("a.jpg", photo()), ("a.txt", "text"), ("a.json", '{"captions": ["json"]}')]
    shard = write_shard(tmp_path / "0.tar", members)
    with open(shard, "rb") as file:
        assert sample_captions(file.fileno(), make_index(shard), 0) == [(0, "text")]
