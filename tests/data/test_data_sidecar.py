"""Sidecars give back what was written, and say clearly what they do not have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerclip.annotate.writer import RegionRows, TreeRows, write_sidecar
from powerclip.data.captions import content_hash
from powerclip.data.mask_codec import GRID, pack_mask
from powerclip.data.sidecar import (
    METADATA,
    Annotator,
    Miss,
    SidecarError,
    SidecarInfo,
    read_info,
    read_regions,
    read_trees,
    sidecar_path,
)
from powerclip.data.trees import Span, tree_from_spans

CAPTION = "a dog on a chair"
SPANS = (Span(0, 16, "NP"), Span(0, 5, "NP"), Span(6, 16, "PP"), Span(9, 16, "NP"))
INFO = SidecarInfo("trees", Annotator("test", "1", {"points": 3}), "0.tar", "10:20", samples=3, items=3)


def write_trees(path: Path, info: SidecarInfo = INFO) -> Path:
    hashes = [[content_hash(CAPTION), content_hash("a cat")], [], [content_hash("…")]]
    spans = [[SPANS, (Span(0, 5, "NP"),)], [], [()]]
    write_sidecar(path, info, TreeRows(["one", "two", "three"], hashes, spans, [[None, "too long"], [], ["empty"]]))
    return path


def write_regions(path: Path, masks: list[np.ndarray]) -> Path:
    info = dataclasses.replace(INFO, kind="regions")
    packed = [pack_mask(mask) for mask in masks]
    rows = RegionRows(["one", "two"], [content_hash(b"file"), content_hash(b"")], [packed, []], [None, "gone"])
    write_sidecar(path, info, rows)
    return path


def test_trees_come_back_by_key_and_caption(tmp_path):
    trees = read_trees(write_trees(tmp_path / "0.trees.parquet"))
    assert len(trees) == 3
    assert trees.keys == ["one", "two", "three"]
    assert "two" in trees
    assert trees.spans("one", CAPTION) == SPANS
    assert tree_from_spans(trees.spans("one", CAPTION), CAPTION).nodes == SPANS
    assert trees.spans("one", "a cat") == (Span(0, 5, "NP"),)
    assert trees.spans("three", "…") == ()
    assert trees.fallback("one", CAPTION) is None
    assert trees.fallback("one", "a cat") == "too long"
    assert trees.hashes("one") == [content_hash(CAPTION), content_hash("a cat")]
    assert trees.info == INFO


def test_a_caption_that_was_edited_is_stale_and_a_key_without_a_row_is_said_so(tmp_path):
    trees = read_trees(write_trees(tmp_path / "0.trees.parquet"))
    assert trees.spans("one", CAPTION + ".") is Miss.STALE
    assert trees.spans("two", CAPTION) is Miss.STALE
    assert trees.spans("four", CAPTION) is Miss.NO_ROW
    assert trees.fallback("four", CAPTION) is None


def test_masks_come_back_by_key_and_image(tmp_path):
    masks = [np.arange(GRID)[:, None] + np.arange(GRID) < size for size in (10, 50)]
    regions = read_regions(write_regions(tmp_path / "0.regions.parquet", masks))
    np.testing.assert_array_equal(regions.masks("one"), masks)
    np.testing.assert_array_equal(regions.masks("one", b"file"), masks)
    assert regions.masks("one", b"another file") is Miss.STALE
    assert regions.masks("three") is Miss.NO_ROW
    assert regions.masks("two").shape == (0, GRID, GRID)
    assert (regions.fallback("one"), regions.fallback("two"), regions.fallback("three")) == (None, "gone", None)
    assert (len(regions), regions.keys, "two" in regions) == (2, ["one", "two"], True)


@given(st.lists(st.lists(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.text(max_size=3)), max_size=4), max_size=3)))
def test_any_rows_come_back(tmp_path_factory, content):
    """Samples with any number of captions, captions with any number of phrases."""
    path = tmp_path_factory.mktemp("rows") / "0.trees.parquet"
    spans = [
        [tuple(Span(start, start, label.encode(errors="replace").decode()) for start, label in one) for one in sample]
        for sample in content
    ]
    captions = [[f"caption {number}" for number in range(len(sample))] for sample in spans]
    keys = [str(number) for number in range(len(spans))]
    hashes = [[content_hash(caption) for caption in sample] for sample in captions]
    rows = TreeRows(keys, hashes, spans, [[None] * len(sample) for sample in spans])
    write_sidecar(path, INFO, rows)
    trees = read_trees(path)
    for key, sample, listed in zip(keys, spans, captions, strict=True):
        assert [trees.spans(key, caption) for caption in listed] == sample


def test_the_same_content_gives_the_same_bytes(tmp_path):
    one, other = write_trees(tmp_path / "1" / "0.trees.parquet"), write_trees(tmp_path / "2" / "0.trees.parquet")
    assert one.read_bytes() == other.read_bytes()


def test_a_sidecar_lies_beside_its_tar_or_in_a_folder():
    assert sidecar_path("data/00012.tar", "trees") == Path("data/00012.trees.parquet")
    assert sidecar_path("s3://bucket/00012.tar", "regions", "side") == Path("side/00012.regions.parquet")


@pytest.mark.parametrize("size", [0, 3, 40, 400, -1])
def test_a_torn_sidecar_is_an_error_that_names_it(tmp_path, size):
    path = write_trees(tmp_path / "0.trees.parquet")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SidecarError, match=r"0\.trees\.parquet.*annotate its shard again"):
        read_trees(path)


def test_a_missing_sidecar_is_an_error_that_names_it(tmp_path):
    with pytest.raises(SidecarError, match=r"0\.trees\.parquet cannot be read"):
        read_info(tmp_path / "0.trees.parquet")


def test_a_parquet_file_of_something_else_is_no_sidecar(tmp_path):
    pq.write_table(pa.table({"key": ["one"]}), tmp_path / "0.trees.parquet")
    with pytest.raises(SidecarError, match="is no sidecar"):
        read_trees(tmp_path / "0.trees.parquet")


def test_a_sidecar_of_another_format_is_refused_with_both_versions(tmp_path):
    path = write_trees(tmp_path / "0.trees.parquet", dataclasses.replace(INFO, format=7))
    with pytest.raises(SidecarError, match="format 7, this powerclip reads format 1"):
        read_trees(path)


def test_metadata_that_cannot_be_read_are_an_error(tmp_path):
    path = tmp_path / "0.trees.parquet"
    for text in ("{", "[]", '{"format": 1}', '{"format": 1, "annotator": {}}'):
        table = pa.table({"key": ["one"]}).replace_schema_metadata({METADATA: text})
        pq.write_table(table, path)
        with pytest.raises(SidecarError, match=r"0\.trees\.parquet has unreadable metadata"):
            read_info(path)


def test_columns_that_are_missing_and_the_other_kind_are_errors(tmp_path):
    path = tmp_path / "0.trees.parquet"
    pq.write_table(pa.table({"key": ["one"]}).replace_schema_metadata({METADATA: INFO.to_json()}), path)
    with pytest.raises(SidecarError, match="other columns"):
        read_trees(path)
    with pytest.raises(SidecarError, match="holds trees, not regions"):
        read_regions(write_trees(path))
