"""Every way to name shards, and what is wrong with one, in one line."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from powerclip.annotate.shard_list import check_names, fingerprint, list_shards, local_copy
from powerclip.errors import UserError


@pytest.fixture
def memory():
    """An empty store behind memory://."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_paths_folders_patterns_and_braces_name_shards_once_and_in_order(tmp_path):
    touch(tmp_path, "b.tar", "a.tar", "a.txt")
    one, two = str(tmp_path / "a.tar"), str(tmp_path / "b.tar")
    assert list_shards([two, one]) == [two, one]
    assert list_shards([str(tmp_path)]) == [one, two]
    assert list_shards([str(tmp_path / "*.tar"), one]) == [one, two]
    assert list_shards([f"{tmp_path}/{{a,b}}.tar"]) == [one, two]
    assert list_shards([f"{tmp_path}/{{00..02}}.tar"]) == [f"{tmp_path}/{number:02d}.tar" for number in range(3)]


def test_a_list_file_holds_any_of_them(tmp_path, memory):
    touch(tmp_path, "a.tar")
    (tmp_path / "list.txt").write_text(f"# mine\n{tmp_path}/*.tar\n\n  memory://x/{{0..1}}.tar\n")
    assert list_shards([f"@{tmp_path}/list.txt"]) == [f"{tmp_path}/a.tar", "memory://x/0.tar", "memory://x/1.tar"]


def test_urls_have_patterns_and_braces(memory):
    for name in ("1.tar", "0.tar", "0.txt"):
        memory.pipe(f"/x/{name}", b"content")
    assert list_shards(["memory://x/*.tar"]) == ["memory:///x/0.tar", "memory:///x/1.tar"]
    with local_copy("memory:///x/0.tar") as copy:
        assert copy.read_bytes() == b"content"
    assert not copy.exists()


def test_the_fingerprint_of_a_shard_changes_with_it(tmp_path, memory):
    path = tmp_path / "a.tar"
    path.write_bytes(b"one")
    before = fingerprint(str(path))
    assert fingerprint(str(path)) == before
    path.write_bytes(b"four")
    assert fingerprint(str(path)) != before
    memory.pipe("/x/0.tar", b"one")
    before = fingerprint("memory://x/0.tar")
    memory.pipe("/x/0.tar", b"four")
    assert fingerprint("memory://x/0.tar") != before


def test_a_shard_that_is_not_there_is_an_os_error(memory):
    for shard in ("memory://x/0.tar", "nowhere/0.tar"):
        with pytest.raises(FileNotFoundError):
            fingerprint(shard)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no shard is named"),
        (["nowhere/*.tar"], "nothing matches"),
        (["memory://nowhere/*.tar"], "nothing matches"),
        (["@nowhere.txt"], "nowhere.txt cannot be read"),
        (["memory://x/{0..1.tar"], "brace is not closed"),
        (["nosuch://x/*.tar"], "nosuch://x/.* cannot be opened"),
    ],
)
def test_what_names_no_shard_is_one_clear_line(arguments, message, memory):
    with pytest.raises(UserError, match=message):
        list_shards(arguments)


def test_two_shards_may_not_share_a_sidecar(tmp_path):
    check_names(["a/0.tar", "b/0.tar"], None)
    with pytest.raises(UserError, match=r"a/0\.tar and b/0\.tar would have the same sidecar"):
        check_names(["a/0.tar", "b/0.tar"], tmp_path)


def test_the_sidecars_of_remote_shards_need_a_folder():
    with pytest.raises(UserError, match="give --sidecars"):
        check_names(["s3://bucket/0.tar"], None)
