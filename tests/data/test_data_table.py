"""Tables of images and captions: which columns are read, what is left out, and that batches are those of shards."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from shard_examples import TOKENIZER, encoded, ramp

from powerclip.data.batch import BatchSpec
from powerclip.data.columns import Columns
from powerclip.data.shard_loader import ShardLoader, ShardOptions
from powerclip.data.table import is_table, read_table
from powerclip.data.table_parts import is_part, open_tables
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks


def write_images(folder: Path, count: int = 4) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:02d}.png" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(encoded(ramp(24, 18, number)))
    return names


def table_of(folder: Path, content: str | bytes, name: str = "t.csv", columns: Columns | None = None):
    write_images(folder)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_table(path, columns)


def pairs(table) -> dict[str, list[str]]:
    return {table.key(number): table.texts(number) for number in range(len(table))}


def test_all_kinds_of_files_hold_the_same_table(tmp_path):
    expected = {"00.png": ["a dog", "a hound"], "01.png": ["a cat, asleep"]}
    csv = 'split,filepath,title\ntrain,00.png,a dog\ntest,01.png,"a cat, asleep"\ntrain,00.png,a hound\n'
    assert pairs(table_of(tmp_path, csv)) == expected
    assert (
        pairs(table_of(tmp_path, "image\tcaption\n00.png\ta dog\n01.png\ta cat, asleep\n00.png\ta hound\n", "t.tsv"))
        == expected
    )
    rows = [{"image": "00.png", "captions": ["a dog", "a hound"]}, {"image": "01.png", "captions": ["a cat, asleep"]}]
    assert pairs(table_of(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")) == expected
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert pairs(read_table(tmp_path / "t.parquet")) == expected
    folder = tmp_path / "folder"
    write_images(folder / "sub", 3)
    (folder / "sub" / "00.txt").write_text("a dog\na hound\n")
    (folder / "sub" / "01.txt").write_text("a cat, asleep")
    assert is_table(folder)
    read = read_table(folder)
    assert pairs(read) == {f"sub/{key}": texts for key, texts in expected.items()}
    assert read.complaints() == ["1 left out: no caption (first sub/02.png)"]


@pytest.mark.parametrize(
    ("heads", "note"),
    [
        ("filepath,title,license", "image: filepath, captions: title (guessed)"),
        ("Image Path,text,split", "image: Image Path, captions: text (guessed)"),
        ("image,caption_1,caption_2", "image: image, captions: caption_1, caption_2 (guessed)"),
        ("image,caption,caption_0", "image: image, captions: caption, caption_0 (guessed)"),
    ],
)
def test_columns_are_guessed_by_heads_that_leave_no_doubt_and_said(tmp_path, heads, note):
    table = table_of(tmp_path, f"{heads}\n00.png,a dog,x\n")
    assert table.note == note
    assert table.texts(0) == ["a dog", "x"][: (note.count("caption_") and 2) or 1]


@pytest.mark.parametrize(
    ("heads", "columns", "expected"),
    [
        ("image,title,text", Columns(), r"title, text could hold the caption; set data\.captions"),
        ("image,path,text", Columns(), r"image, path could hold the image; set data\.image"),
        ("image,image", Columns(), r"columns 1, 2 are all called 'image'; set data\.image to the number of one"),
        ("image;caption", Columns(), r"its cells are separated by ';': write them with commas"),
        ("image,label,split", Columns(), r"of its columns image, label, split, none is known to hold the caption"),
        (
            "image,title,text",
            Columns("imag", ("text",)),
            r"data\.image: .* no column 'imag' \(did you mean 'image'\?\)",
        ),
        ("image,title,text", Columns("", ("image",)), r"image cannot be the image and a caption"),
        (
            "00.png,a dog,a hound",
            Columns(),
            r"no line of heads \(its first row is 00\.png \| a dog.*data\.captions=2,3",
        ),
        ("00.png,a dog,a hound", Columns("1", ("title",)), r"has no line of heads .* by its number, 1 to 3"),
    ],
)
def test_columns_in_doubt_are_an_error_that_says_what_to_set(tmp_path, heads, columns, expected):
    with pytest.raises(UserError, match=expected):
        table_of(tmp_path, f"{heads}\n00.png,a dog,x\n", columns=columns)


def test_a_file_without_heads_keeps_its_first_row(tmp_path):
    table = table_of(tmp_path, "00.png,a dog\n01.png,a cat\n")
    assert pairs(table) == {"00.png": ["a dog"], "01.png": ["a cat"]}
    assert table.note == "no line of heads; image: column 1, captions: column 2 (guessed)"
    numbered = table_of(tmp_path, "x,00.png,a dog,a hound\n", columns=Columns("2", ("3", "4")))
    assert pairs(numbered) == {"00.png": ["a dog", "a hound"]}


def test_rows_that_cannot_be_used_are_counted_and_named(tmp_path):
    rows = ["00.png,a dog", "gone.png,a cat", "01.png,  ", "02.png,a cat, asleep", "03.png,\0", ",a bird"]
    table = table_of(tmp_path, "image,caption\n" + "\n".join(rows))
    assert pairs(table) == {"00.png": ["a dog"]}
    assert table.left_out == {
        "image not there": 2,
        "no caption": 1,
        "other cells than heads": 1,
        "captions that are no text": 1,
    }
    said = " ".join(table.complaints())
    assert "line 5: 3 instead of 2" in said
    assert "line 4: 01.png" in said
    with pytest.raises(UserError, match=r"5 of 6 rows are bad; .*line 4: 01\.png.*raise data\.max_bad"):
        open_tables([tmp_path / "t.csv"], max_bad=0.5)
    with pytest.raises(UserError, match=r"data\.strict: false goes on"):
        open_tables([tmp_path / "t.csv"], strict=True)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.csv", "image,caption\nhttps://x.org/a.jpg,a dog\n", "no row can be used; 1 left out: .*img2dataset"),
        ("t.csv", "image,caption\n", "no rows below the heads"),
        ("t.csv", b"image,caption\n00.png,caf\xe9\n", "cannot be read as a table in UTF-8"),
        (
            "t.jsonl",
            "[1]\n{",
            "no row can be used; 2 left out: other cells .*first line 1: not a JSON object",
        ),
        ("t.parquet", "PAR1", "cannot be read as parquet"),
    ],
)
def test_a_table_of_which_nothing_can_be_used_is_one_clear_line(tmp_path, name, content, expected):
    with pytest.raises(UserError, match=expected) as caught:
        table_of(tmp_path, content, name)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_that_holds_the_images_themselves_is_refused(tmp_path):
    pq.write_table(pa.table({"image": [b"\x89PNG"], "text": ["a dog"]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="its column image holds binary; the paths of image files are read"):
        read_table(tmp_path / "t.parquet")


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """A table of 23 images."""
    folder = tmp_path_factory.mktemp("table")
    names = write_images(folder, 23)
    rows = [f"{name},a dog on chair number {number}\n" for number, name in enumerate(names)]
    (folder / "t.csv").write_text("image,caption\n" + "".join(rows))
    return folder / "t.csv"


def loader(path: Path, ranks: Ranks = SINGLE, **settings) -> ShardLoader:
    spec = BatchSpec(image_size=(16, 16), grid=(2, 2), batch_size=4, regions=3, **settings)
    return ShardLoader(open_tables([path]), spec, TOKENIZER, ShardOptions(trees=False, window=2), ranks)


def test_an_epoch_of_a_table_shows_every_image_once_whatever_the_workers_and_ranks(big, monkeypatch):
    monkeypatch.setattr("powerclip.data.table_parts.PART", 6)
    one = loader(big, workers=0)
    assert one.shards.counts == [6, 6, 6, 5]
    assert all(is_part(str(path)) for path in one.shards.paths)
    batches = [one.batch(step) for step in range(12)]
    keys = [key for batch in batches for key in batch.keys]
    assert sorted(keys[:23]) == sorted(keys[23:46]) == sorted(f"{number:02d}.png" for number in range(23))
    with_workers = list(loader(big, workers=2).stream(3, 8))  # as a run that is resumed at step 3
    halves = [loader(big, Ranks(rank, 2), workers=0) for rank in (0, 1)]
    for step, streamed in enumerate(with_workers, 3):
        assert torch.equal(streamed.images, batches[step].images)
        parts = [half.batch(step) for half in halves]
        assert torch.equal(torch.cat([part.images for part in parts]), batches[step].images)


def test_an_image_that_is_damaged_or_vanishes_is_replaced_and_counted(tmp_path):
    names = write_images(tmp_path, 12)
    (tmp_path / "t.csv").write_text("image,caption\n" + "".join(f"{name},a dog\n" for name in names))
    source = loader(tmp_path / "t.csv", workers=0)
    (tmp_path / names[3]).write_bytes(b"no image")
    (tmp_path / names[5]).unlink()
    batches = [source.batch(step) for step in range(3)]
    counts = sum((batch.counts for batch in batches), start=batches[0].counts.__class__())
    assert (counts["bad/unreadable_image"], counts["bad/missing_image"]) == (1, 1)
    assert not {names[3], names[5]} & {key for batch in batches for key in batch.keys}
