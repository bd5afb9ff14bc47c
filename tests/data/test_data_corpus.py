"""Reading a corpus: what is there comes back, what is broken is counted or named, nothing is lost in silence."""

from __future__ import annotations

import gzip
import io
import json

import numpy as np
import pytest
import torch
from mini_corpus import COLOURS, png, write_shard
from PIL import Image
from shard_examples import caption_of, info, spans_of, write_samples, write_trees

from powerclip.annotate.writer import TreeRows, write_sidecar
from powerclip.data.captions import content_hash
from powerclip.data.corpus import (
    NO_CAPTION,
    NO_IMAGE,
    NO_TREE,
    STALE_TREE,
    UNPARSED,
    WRONG_TREE,
    find_trees,
    read_corpus,
    read_tree_file,
)
from powerclip.data.trees import flat_tree, parse_bracketed, tree_from_spans
from powerclip.errors import UserError


def test_images_captions_and_trees_come_back_in_order(mini_corpus):
    shards = sorted(mini_corpus.glob("train-*.tar"))
    corpus = read_corpus(shards, 20, mini_corpus / "trees.tsv")
    assert corpus.keys == [f"sample{number:03d}" for number in range(12)]
    assert corpus.images.shape == (12, 3, 20, 20)
    assert corpus.captions[:3] == ["a red square", "a green square", "a green square on a wall number 1"]
    assert corpus.image_of_caption.tolist()[:4] == [0, 1, 1, 2]
    expected = "(NP (NP a green square) (PP on (NP a wall number 1)))"
    assert corpus.trees[2] == parse_bracketed(expected, corpus.captions[2])
    assert corpus.fallbacks == {}
    assert corpus.images[0, :, 3, 3].tolist() == list(COLOURS["red"])
    assert corpus.summary() == "12 images, 18 captions"


def test_images_are_squashed_to_the_size_that_is_asked_for(tmp_path):
    file = io.BytesIO()
    wide = Image.new("L", (40, 20))  # grey, black at the left and white at the right
    wide.paste(255, (20, 0, 40, 20))
    wide.save(file, "jpeg")
    shard = write_shard(tmp_path / "a.tar", [("x.JPG", file.getvalue()), ("x.txt", "half and half\n")])
    corpus = read_corpus([shard], 16)
    assert corpus.captions == ["half and half"]
    assert corpus.images.shape == (1, 3, 16, 16)
    assert corpus.images[0, :, :, :6].max() < 40
    assert corpus.images[0, :, :, 10:].min() > 215


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.txt", "  a dog \n", ["a dog"]),
        ("x.json", '{"caption": "a dog"}', ["a dog"]),
        ("x.json", '{"captions": ["a dog", "a cat"], "caption": "no"}', ["a dog", "a cat"]),
        ("x.json", '{"captions": ["a dog", null, " ", 3, "a cat"]}', ["a dog", "a cat"]),
    ],
)
def test_captions_are_read_from_text_and_from_json(tmp_path, name, content, expected):
    shard = write_shard(tmp_path / "a.tar", [("x.png", png()), (name, content)])
    assert read_corpus([shard], 8).captions == expected


def test_a_caption_keeps_its_number_when_one_before_it_is_empty(tmp_path):
    content = json.dumps({"captions": ["", "a dog"]})
    shard = write_shard(tmp_path / "a.tar", [("x.png", png()), ("x.json", content)])
    trees = tmp_path / "trees.tsv"
    trees.write_text("x\t0\t(NP a cat)\nx\t1\t(NP a dog)\n")
    corpus = read_corpus([shard], 8, trees)
    assert corpus.fallbacks == {}
    assert corpus.trees == [parse_bracketed("(NP a dog)", "a dog")]


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 32_896, np.uint16)).save(file, "png")
    shard = write_shard(tmp_path / "a.tar", [("x.png", file.getvalue()), ("x.txt", "grey")])
    assert read_corpus([shard], 8).images.unique().tolist() == [128]  # cut at 255 it would be white


NESTED = "[" * 100_000  # deeper than json goes


@pytest.mark.parametrize(
    "content",
    ["", "{", '"a dog"', "[1]", '{"captions": 5}', '{"caption": ""}', "{}", pytest.param(NESTED, id="nested")],
)
def test_samples_that_cannot_be_used_are_counted_and_left_out(tmp_path, content):
    members = [
        ("good.png", png()),
        ("good.txt", "a dog"),
        ("silent.png", png()),
        ("silent.json", content),
        ("broken.png", png()[:40]),
        ("broken.txt", "a dog"),
        ("text.jpg", "no image"),
        ("text.txt", "a dog"),
        ("alone.txt", "a dog"),
    ]
    corpus = read_corpus([write_shard(tmp_path / "a.tar", members)], 8)
    assert corpus.keys == ["good"]
    assert corpus.fallbacks == {NO_CAPTION: 1, NO_IMAGE: 3}
    assert "3 images not readable" in corpus.summary()


def test_a_tree_that_is_missing_or_does_not_match_is_counted_and_flat(tmp_path):
    captions = json.dumps({"captions": ["a dog on a bed", "a dog on a sofa", "a dog on a mat"]})
    shard = write_shard(tmp_path / "a.tar", [("x.png", png()), ("x.json", captions)])
    trees = tmp_path / "trees.tsv.gz"
    with gzip.open(trees, "wt") as file:
        file.write("x\t0\t(NP (NP a dog) (PP on (NP a bed)))\nx\t1\t(NP (NP a cat) (PP on (NP a sofa)))\n")
    corpus = read_corpus([shard], 8, trees)
    assert corpus.fallbacks == {NO_TREE: 1, WRONG_TREE: 1}
    assert len(corpus.trees[0].nodes) > 1
    assert corpus.trees[1:] == [flat_tree(caption) for caption in corpus.captions[1:]]
    assert read_corpus([shard], 8).fallbacks == {}  # no trees were asked for


def test_trees_are_read_from_the_sidecars_of_the_shards(tmp_path):
    first, second, bare = write_samples(tmp_path, [3, 2, 1])
    write_trees(first, {key: caption_of(key) for key in ("s0000", "s0001")})
    write_trees(second, {"s0003": caption_of("another"), "s0004": caption_of("s0004")})
    assert find_trees([bare]) is None
    corpus = read_corpus([first, second, bare], 8, find_trees([first, second, bare]))
    assert corpus.fallbacks == {NO_TREE: 2, STALE_TREE: 1}  # without a row, without a sidecar; of another caption
    assert corpus.trees_missing == 3
    parsed = [tree_from_spans(spans_of(caption), caption) for caption in corpus.captions]
    flat = [flat_tree(caption) for caption in corpus.captions]
    assert corpus.trees == [*parsed[:2], flat[2], flat[3], parsed[4], flat[5]]


def test_trees_in_a_folder_are_read_from_there_and_what_the_parser_left_flat_is_counted(tmp_path):
    (shard,) = write_samples(tmp_path / "shards", [1])
    rows = TreeRows(["s0000"], [[content_hash(caption_of("s0000"))]], [[[]]], [["too long"]])
    write_sidecar(tmp_path / "side" / "00000.trees.parquet", info("trees", shard, 1), rows)
    assert find_trees([shard]) is None
    corpus = read_corpus([shard], 8, find_trees([shard], tmp_path / "side"))
    assert corpus.fallbacks == {UNPARSED: 1}
    assert corpus.trees_missing == 0
    (tmp_path / "side" / "00000.trees.parquet").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"sidecar .*00000\.trees\.parquet cannot be read"):
        read_corpus([shard], 8, find_trees([shard], tmp_path / "side"))


def test_a_compressed_tar_is_named_with_what_to_do(tmp_path):
    (shard,) = write_samples(tmp_path, [2])
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(UserError, match=r"packed\.tar\.gz cannot be read: compressed: unpack it first, as with gunzip"):
        read_corpus([packed], 8)


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.7, 0.95])
def test_a_torn_shard_is_named(tmp_path, keep):
    members = [pair for n in range(4) for pair in ((f"{n}.png", png()), (f"{n}.txt", "a dog"))]
    shard = write_shard(tmp_path / "torn.tar", members)
    used = 4 * 4 * 512  # header and one block of data for each member; zeros follow
    shard.write_bytes(shard.read_bytes()[: int(used * keep)])
    with pytest.raises(UserError, match=r"torn\.tar cannot be read"):
        read_corpus([shard], 8)


def test_what_is_no_tar_and_what_is_not_there_are_named(tmp_path):
    (tmp_path / "a.tar").write_text("not a tar" * 500)
    for name in ("a.tar", "gone.tar"):
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            read_corpus([tmp_path / name], 8)


def test_a_corpus_without_a_sample_is_refused_with_the_reason(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("x.png", png())])
    with pytest.raises(UserError, match=r"no sample .*a\.tar: 1 images without a caption"):
        read_corpus([shard], 8)


@pytest.mark.parametrize("line", ["x\t0", "x\tfirst\t(NP a)", "x\t0\t(NP a)\tmore", ""])
def test_a_wrong_line_of_trees_is_named_with_its_number(tmp_path, line):
    path = tmp_path / "trees.tsv"
    path.write_text(f"x\t0\t(NP a dog)\n{line}\n")
    with pytest.raises(UserError, match=r"trees\.tsv, line 2"):
        read_tree_file(path)


def test_a_file_of_trees_that_is_torn_or_missing_is_named(tmp_path):
    path = tmp_path / "trees.tsv.gz"
    path.write_bytes(gzip.compress(b"x\t0\t(NP a dog)\n" * 100)[:-20])
    with pytest.raises(UserError, match=r"trees\.tsv\.gz cannot be read"):
        read_tree_file(path)
    with pytest.raises(UserError, match="no file of trees"):
        read_tree_file(tmp_path / "gone.tsv")


def test_how_many_threads_decode_changes_nothing(mini_corpus):
    shards = sorted(mini_corpus.glob("*.tar"))
    one, four = (read_corpus(shards, 20, threads=threads) for threads in (1, 4))
    assert one.keys == four.keys
    assert torch.equal(one.images, four.images)


def test_the_held_out_photographs_are_read_whole_and_their_trees_match(real_data):
    folder = real_data / "captions10k"
    corpus = read_corpus([folder / "val-000.tar"], 128, folder / "trees.tsv.gz")
    assert (len(corpus.keys), len(corpus.captions)) == (1000, 5000)
    assert sum(corpus.fallbacks.values()) <= 5
    assert sum(len(tree.nodes) for tree in corpus.trees) / 5000 > 4
