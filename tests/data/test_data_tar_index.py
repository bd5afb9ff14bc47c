"""The index of a tar: what tarfile finds, whoever wrote the tar; kept, checked, and honest about what is cut off."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_corpus import write_shard
from shard_examples import sample, write_samples

from powerclip.data import tar_index
from powerclip.data.tar_index import TarDamage, find_info, index_path, iter_members, load_index, make_index, read_index
from powerclip.errors import UserError


def extents(path, index) -> dict[str, bytes]:
    """Every file that an index knows, read at its place."""
    data = path.read_bytes()
    files = {}
    for number, key in enumerate(index.keys):
        offset, size = index.image(number)
        files[f"{key}.png"] = data[offset : offset + size]
        for (offset, size), suffix in index.caption_files(number):
            files[f"{key}.{suffix}"] = data[offset : offset + size]
    return files


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize(
    "folder", ["", "./", "a/" * 60, f"{'x' * 120}/", "très/"], ids=["plain", "dot", "prefix", "long", "accent"]
)
def test_members_lie_where_tarfile_finds_them(tmp_path, form, folder):
    if form == tarfile.USTAR_FORMAT and "x" in folder:
        pytest.skip("ustar has no names that long")
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=form) as tar:
        tar.addfile(tarfile.TarInfo("folder"))
        directory = tarfile.TarInfo("folder2")
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        for name, content in [*sample("one"), *sample("two"), ("two.json", b'{"captions": ["x"]}')]:
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(folder + name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    with tarfile.open(path) as tar:
        members = {member.name.rpartition("/")[2]: tar.extractfile(member).read() for member in tar if member.size}
    index = make_index(path)
    assert index.keys == ["one", "two"]
    assert index.info.damage is None
    assert extents(path, index) == members


def test_a_size_that_only_a_pax_record_tells_is_read(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sample("one"):
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size, entry.pax_headers = len(data), {"size": str(len(data)), "path": f"renamed/{name}"}
            tar.addfile(entry, io.BytesIO(data))
    assert make_index(path).keys == ["one"]


def test_samples_without_an_image_or_a_caption_are_left_out_and_counted(tmp_path):
    members = [("a.txt", "no image"), *sample("b"), ("c.png", b"x"), ("d.png", b"x"), ("d.txt", b""), ("e.png", b"")]
    members += [("e.txt", "an empty image"), ("f.gif", b"x"), ("f.txt", "not an image's suffix")]
    index = make_index(write_shard(tmp_path / "a.tar", members))
    assert index.keys == ["b"]
    assert index.info.left_out == {"no image": 3, "no caption": 2}


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_of_a_tar_that_was_cut_only_whole_samples_are_used(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    (path,) = write_samples(folder, [4])
    whole = extents(path, make_index(path))
    size = path.stat().st_size
    cut = data.draw(st.integers(1, size - 1))
    os.truncate(path, cut)
    index = make_index(path)
    assert len(index) <= 4
    assert all(whole[name] == content for name, content in extents(path, index).items())
    # Behind the last sample there is only the end of the tar, which may be missing.
    assert index.info.damage in ("cut off", "not a tar") or len(index) == 4


def test_damage_is_said_not_raised(tmp_path):
    empty, other, hole = tmp_path / "empty.tar", tmp_path / "other.tar", tmp_path / "hole.tar"
    packed = tmp_path / "packed.tar.gz"
    empty.write_bytes(b"")
    other.write_bytes(b"<html>not found</html>" * 100)
    (path,) = write_samples(tmp_path, [3])
    data = bytearray(path.read_bytes())
    packed.write_bytes(gzip.compress(data))
    second = make_index(path).image(1).offset - 512
    data[second : second + 512] = b"\xff" * 512
    hole.write_bytes(data)
    infos = {one.stem: make_index(one).info for one in (empty, other, hole, packed)}
    assert {name: (info.damage, info.samples) for name, info in infos.items()} == {
        "empty": ("empty file", 0),
        "other": ("not a tar", 0),
        "hole": ("cut off", 0),
        "packed.tar": ("compressed: unpack it first, as with gunzip", 0),
    }


def test_a_member_whose_name_begins_like_a_compressed_file_is_a_member(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("BZh1.png", b"x"), ("BZh1.txt", "a name of its own")])
    assert make_index(path).keys == ["BZh1"]


def test_iter_members_yields_names_and_places_and_raises_at_the_damage(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.png", b"image"), ("a.txt", "caption")])
    content = path.read_bytes()
    members = [(member.name, content[member.offset : member.offset + member.size]) for member in iter_members(path)]
    assert members == [("a.png", b"image"), ("a.txt", b"caption")]
    os.truncate(path, 1024)
    members = iter_members(path)
    assert next(members).name == "a.png"
    with pytest.raises(TarDamage, match="cut off"):
        next(members)
    with pytest.raises(FileNotFoundError):
        next(iter_members(tmp_path / "gone.tar"))


def test_an_index_is_kept_and_read_back(tmp_path, monkeypatch):
    (path,) = write_samples(tmp_path, [5])
    made = load_index(path)
    monkeypatch.setattr(tar_index, "make_index", lambda tar: pytest.fail("indexed twice"))
    kept = load_index(path)
    assert kept.info == made.info
    assert kept.keys == made.keys
    assert extents(path, kept) == extents(path, made)
    assert find_info(path)[0].samples == 5


def test_an_index_of_another_tar_or_version_is_made_anew(tmp_path):
    (path,) = write_samples(tmp_path, [2])
    load_index(path)
    (path,) = write_samples(tmp_path, [3])
    assert find_info(path) is None
    assert len(load_index(path)) == 3
    # As large as before, but written later.
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert find_info(path) is None


@pytest.mark.parametrize("broken", [b"", b"no json\n", b"{}\n", b'{"keys": 1}\n', "half"])
def test_a_torn_index_is_made_anew(tmp_path, broken):
    (path,) = write_samples(tmp_path, [2])
    load_index(path)
    kept = index_path(path)
    content = kept.read_bytes()
    kept.write_bytes(content[:-3] if broken == "half" else broken)
    if broken != "half":
        assert find_info(path) is None
    else:
        with pytest.raises(ValueError, match="is no index"):
            read_index(kept)
    assert len(load_index(path)) == 2
    assert kept.read_bytes() == content


def test_where_shards_cannot_be_written_the_index_lies_with_the_sidecars_or_in_the_cache(tmp_path, monkeypatch):
    # Root may write anywhere: a file in the place of a folder stops it too.
    (path,) = write_samples(tmp_path / "shards", [2])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = tar_index.write_atomic

    def read_only(target, content):
        if target.parent == path.parent:
            raise PermissionError(13, "Permission denied")
        real(target, content)

    monkeypatch.setattr(tar_index, "write_atomic", read_only)
    load_index(path, tmp_path / "sidecars")
    assert (tmp_path / "sidecars" / "00000.tar.index").is_file()
    load_index(path)
    assert list((tmp_path / "cache").rglob("00000-*.index"))
    assert not index_path(path).exists()
    (tmp_path / "blocked").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    with pytest.raises(UserError, match=r"the index of .*00000\.tar cannot be kept in .*set data\.sidecars"):
        load_index(path)
