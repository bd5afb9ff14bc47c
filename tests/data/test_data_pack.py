"""`powerclip pack`: a table becomes shards with the same samples, goes on where it stopped, and names what it skips."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from shard_examples import encoded, ramp
from typer.testing import CliRunner

from powerclip.cli import app
from powerclip.data import pack
from powerclip.data.pack import pack_table
from powerclip.data.shards import open_shards
from powerclip.errors import UserError


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Seven images, one of several captions, one as BMP, one truncated, one row without an image."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = ["image,caption"]
    for number in range(7):
        form = "bmp" if number == 2 else "png"
        data = encoded(ramp(24, 18, number), form)
        (folder / f"{number}.{form}").write_bytes(data[:60] if number == 4 else data)
        lines.append(f"{number}.{form},a dog {number}")
    (folder / "t.csv").write_text("\n".join([*lines, "1.png,a hound", "gone.png,a cat"]))
    return folder / "t.csv"


def test_shards_hold_what_the_table_holds_and_name_what_they_do_not(tmp_path, table):
    done = CliRunner().invoke(app, ["pack", str(table), "-o", str(tmp_path / "out"), "--images", "3"])
    assert done.exit_code == 0, done.output
    said = done.output.replace("\n", " ")
    assert "7 images, 8 captions; image: image, captions: caption (guessed); 1 left out: image not there" in said
    assert "3 shards, 6 samples (1 left out: bad/truncated_image, first 4.png)" in said
    tars = sorted((tmp_path / "out").glob("*.tar"))
    shards = open_shards(tars)
    assert shards.counts == [3, 2, 1]
    assert all(tar.with_name(f"{tar.name}.index").is_file() for tar in tars)
    samples = [
        (opened.captions(n), opened.image(n)) for opened in map(shards.open, range(3)) for n in range(len(opened.keys))
    ]
    assert [captions for captions, _ in samples] == [
        ["a dog 0"],
        ["a dog 1", "a hound"],
        ["a dog 2"],
        ["a dog 3"],
        ["a dog 5"],
        ["a dog 6"],
    ]
    assert samples[0][1] == (table.parent / "0.png").read_bytes()
    assert samples[2][1].startswith(b"\x89PNG")


def test_packing_goes_on_where_it_was_stopped_and_gives_the_same_bytes(tmp_path, table, monkeypatch):
    pack_table(table, tmp_path / "whole", images=2, quiet=True)
    read = pack.storable_image
    calls = []

    def stop(data: bytes) -> tuple[bytes, str]:
        calls.append(data)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return read(data)

    monkeypatch.setattr(pack, "storable_image", stop)
    with pytest.raises(KeyboardInterrupt):
        pack_table(table, tmp_path / "parts", images=2, quiet=True)
    left = {path.name for path in (tmp_path / "parts").iterdir()}
    assert "00000.tar" in left
    assert not any(name.endswith(".partial") for name in left)
    monkeypatch.setattr(pack, "storable_image", read)
    pack_table(table, tmp_path / "parts", images=2, quiet=True)
    for tar in (tmp_path / "whole").glob("*.tar"):
        assert tar.read_bytes() == (tmp_path / "parts" / tar.name).read_bytes()
        tarfile.open(tar).close()


def test_a_folder_of_something_else_is_left_alone(tmp_path, table):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("mine")
    with pytest.raises(UserError, match="is not an empty folder"):
        pack_table(table, tmp_path / "other", quiet=True)
    pack_table(table, tmp_path / "out", quiet=True)
    table.write_text(table.read_text().replace("a dog 3", "a cat 3"))
    with pytest.raises(UserError, match="of another table, or of this one before it changed"):
        pack_table(table, tmp_path / "out", quiet=True)
