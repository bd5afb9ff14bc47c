"""Phrases with boxes as JSON lines: keys find their images, and what is wrong is one line that names where."""

from __future__ import annotations

import gzip
import json

import pytest
from benchmark_examples import image, tiny_model
from mini_corpus import write_shard

from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.entities import read_entities
from powerclip.evaluate.images import TarImages
from powerclip.evaluate.paper_tables import build_tables
from powerclip.evaluate.runner import evaluate, jobs_for_paths
from powerclip.evaluate.tasks import PointingGame

CAPTION = "a dog on two chairs"
DOG, LEFT, RIGHT = [0.3, 0.0, 0.7, 0.4], [0.0, 0.5, 0.4, 1.0], [0.6, 0.5, 1.0, 1.0]
PHRASES = [
    {"start": 0, "end": 5, "entity": "1", "kind": "animals", "boxes": [DOG]},
    {"start": 9, "end": 19, "entity": "2", "kind": "other", "boxes": [LEFT, RIGHT]},
]


def line(**changes):
    return {"key": "k0", "caption": CAPTION, "phrases": PHRASES, **changes}


def phrase(**changes):
    return line(phrases=[PHRASES[0] | changes])


def write(folder, lines, name="val.jsonl"):
    content = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines).encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.fixture
def shard(tmp_path):
    members = [(f"k{number}.png", image(tmp_path / "drawn.png", number).read_bytes()) for number in range(3)]
    (tmp_path / "drawn.png").unlink()
    return write_shard(tmp_path / "val.tar", members)


@pytest.mark.parametrize("name", ["val.jsonl", "val.jsonl.gz"])
def test_phrases_find_the_images_of_their_keys(name, shard, tmp_path):
    other = line(key="k2", caption="Two chairs", phrases=[{"start": 0, "end": 10, "boxes": [LEFT, RIGHT, LEFT]}])
    task = read_entities(write(tmp_path, [line(), "", other, line()], name), [shard])
    game = task.phrases
    assert [one.rpartition(" ")[2] for one in game.images.names] == ["k0.png", "k2.png"]
    assert list(game.image_of_phrase) == [0, 0, 1, 0, 0]
    assert [game.captions[t][span.start : span.end] for t, span in enumerate(game.spans)] == [
        "a dog", "two chairs", "Two chairs", "a dog", "two chairs",
    ]  # fmt: skip
    assert list(task.caption_of_phrase) == [0, 0, 1, 2, 2]  # the same caption twice is two captions
    assert game.boxes[2] == [tuple(LEFT), tuple(RIGHT)]


def test_a_folder_of_images_or_of_tars_is_as_good_as_a_tar(shard, tmp_path):
    path = write(tmp_path, [line()])
    image(tmp_path / "photos" / "deep" / "k0.png", 0)
    image(tmp_path / "photos" / "twice" / "else.png", 1)
    image(tmp_path / "photos" / "else.png", 1)  # a name that no caption asks for may come twice
    assert read_entities(path, [tmp_path / "photos"]).images.names == [str(tmp_path / "photos" / "deep" / "k0.png")]
    (tmp_path / "tars").mkdir()
    shard.rename(tmp_path / "tars" / "val.tar")
    assert isinstance(read_entities(path, [tmp_path / "tars"]).images, TarImages)


def test_captions_without_their_image_are_counted_and_said(shard, tmp_path, capsys):
    path = write(tmp_path, [line(key="gone"), line(), line(key="k1")])
    task = read_entities(path, [shard])
    assert task.summary == "2 images, 4 phrases, 1 captions left out: their images are not there"
    done = evaluate(
        Embedder(*tiny_model()), jobs_for_paths([], grounding=[path], images=[shard]), tmp_path / "out", model="tiny"
    )
    (record,) = done.results["val"]
    assert record["task"] == "grounding"
    assert record["powerclip"]["counts"] == {
        "images": 2, "phrases": 4, "pairs": 2, "phrases with sets": 4, "missing": 1,
    }  # fmt: skip
    shown = " ".join(capsys.readouterr().out.split())
    assert "pointing in caption / alone" in shown
    assert "1 captions left out: their images are not there" in shown
    assert [table.key for table in build_tables([record])] == ["own"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([line(), "{"], "line 2: not JSON"),
        ([line(), "", "[1]"], "line 3: expected key, caption and phrases"),
        ([line(key=7)], "line 1: 'key' is missing or no text"),
        ([line(caption=" ")], "line 1: 'caption' is missing"),
        ([line(phrases=None)], "line 1: 'phrases' must be a list"),
        ([line(phrases=[])], "has a phrase"),
        ([line(phrases=["a dog"])], "line 1, phrase 0: expected start, end and boxes"),
        ([phrase(start="0")], "'start' and 'end' must be numbers"),
        ([phrase(end=20)], "0 to 20 lies outside of a caption of 19 characters"),
        ([phrase(start=5)], "5 to 5 lies outside"),
        ([phrase(start=-1)], "-1 to 5 lies outside"),
        ([phrase(start=1, end=2)], "holds no word"),
        ([line(phrases=[PHRASES[0], PHRASES[1] | {"boxes": []}])], "line 1, phrase 1: 'boxes' must be a list of at"),
        ([phrase(boxes=[[0.1, 0.2, 0.3]])], "a box is left, top, right and bottom"),
        ([phrase(boxes=[[10, 20, 30, 40]])], "in shares of the sides, 0 to 1"),
        ([phrase(boxes=[[0.1, float("nan"), 0.3, 0.4]])], "in shares of the sides"),
        ([phrase(boxes=[[0.5, 0.5, 0.5, 0.9]])], "has no area"),
        ([line(key="gone")], "none of the images that"),
    ],
)
def test_a_wrong_line_is_named_in_one_line(lines, message, shard, tmp_path):
    with pytest.raises(UserError) as caught:
        read_entities(write(tmp_path, lines), [shard])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_that_cannot_be_told_apart_or_read_are_refused(shard, tmp_path):
    path = write(tmp_path, [line(), line(key="k9")])
    image(tmp_path / "a" / "k0.png", 0)
    image(tmp_path / "b" / "k9.png", 0)
    with pytest.raises(UserError, match=r"have the same key 'k0'"):
        read_entities(path, [shard, tmp_path / "a"])
    with pytest.raises(UserError, match="give one kind"):
        read_entities(path, [shard, tmp_path / "b"])
    (tmp_path / "no.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(UserError, match="cannot be read as a tar"):
        read_entities(path, [tmp_path / "no.tar"])
    (tmp_path / "val.jsonl.gz").write_bytes(gzip.compress(b"{}" * 100)[:20])
    with pytest.raises(UserError, match="cannot be read"):
        read_entities(tmp_path / "val.jsonl.gz", [shard])


def test_captions_of_flickr8k(real_data, tmp_path):
    source, shard = real_data / "grounding" / "flickr8k-val.jsonl.gz", real_data / "captions10k" / "val-000.tar"
    if not source.is_file():
        pytest.skip(f"needs {source}")
    with gzip.open(source, "rt", encoding="utf-8") as file:
        lines = [next(file).rstrip("\n") for _ in range(60)]
    path = write(tmp_path, lines)
    task = read_entities(path, [shard])
    assert task.missing == 0
    count = sum(len(json.loads(one)["phrases"]) for one in lines)
    assert len(task.phrases.spans) == count
    embedder = Embedder(*tiny_model())
    found = task.score(embedder)
    assert found.counts["phrases"] == count
    assert found.counts["pairs"] > 40
    whole = found.parts[""]
    assert None not in whole.values()
    assert whole["pointing_chance"] < whole["pointing_fixed_patch"] < 1
    # The same phrases as a pointing game of their own have the same accuracy.
    game = task.phrases
    alone = PointingGame(game.images, game.image_of_phrase, game.captions, game.spans, game.boxes).score(embedder)
    assert alone.parts[""].items() <= whole.items()
