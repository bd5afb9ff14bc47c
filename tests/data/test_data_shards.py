"""Which shards a recipe names, what they hold, and how much may be wrong with them."""

from __future__ import annotations

import pytest
from mini_corpus import write_shard
from shard_examples import sample, write_samples

from powerclip.data import shards as module
from powerclip.data.shards import expand_shards, index_shards, open_shards
from powerclip.data.tar_index import index_path
from powerclip.errors import UserError
from powerclip.runtime.distributed import Ranks


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_shards_are_named_by_path_pattern_braces_or_list(tmp_path, monkeypatch):
    write_samples(tmp_path, [1, 1, 1])
    monkeypatch.setenv("HERE", str(tmp_path))
    assert names(expand_shards("$HERE/00001.tar", "data.shards")) == ["00001.tar"]
    assert names(expand_shards("$HERE/*.tar", "data.shards")) == ["00000.tar", "00001.tar", "00002.tar"]
    assert names(expand_shards("${HERE}/{00001..00003}.tar", "data.shards")) == ["00001.tar", "00002.tar", "00003.tar"]
    (tmp_path / "list.txt").write_text("# ours\n$HERE/{00002,00000}.tar\n\n$HERE/00001.tar\n")
    assert names(expand_shards("@$HERE/list.txt", "data.shards")) == ["00002.tar", "00000.tar", "00001.tar"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nowhere/*.tar", r"data\.shards: nothing matches nowhere/\*\.tar"),
        ("$NOT_SET_HERE/a.tar", "NOT_SET_HERE is not set"),
        ("a{1..3.tar", "a brace is not closed"),
        ("@nowhere.txt", r"list of shards nowhere\.txt cannot be read: No such file"),
        ("{a,a}.tar", r"a\.tar is named twice"),
        ("@/dev/null", "names no shard"),
    ],
)
def test_what_names_no_shard_is_said_in_one_line(text, expected):
    with pytest.raises(UserError, match=expected):
        expand_shards(text, "data.shards")


def test_shards_are_counted_once_and_then_known(tmp_path, monkeypatch):
    paths = write_samples(tmp_path, [3, 5])
    shards = open_shards(paths)
    assert (shards.counts, shards.samples, shards.summary()) == ([3, 5], 8, "2 shards, 8 samples")
    assert all(index_path(path).is_file() for path in paths)
    monkeypatch.setattr(module, "index_shards", lambda *args, **options: pytest.fail("indexed twice"))
    assert open_shards(paths).counts == [3, 5]


def test_many_shards_are_indexed_by_processes_with_the_same_result(tmp_path):
    paths = write_samples(tmp_path, [1 + number % 3 for number in range(20)])
    assert open_shards(paths, tmp_path / "indices").counts == [1 + number % 3 for number in range(20)]
    assert len(list((tmp_path / "indices").iterdir())) == 20


def test_ranks_that_start_together_begin_at_different_shards(tmp_path, monkeypatch):
    paths = write_samples(tmp_path, [1] * 6)
    begun = []
    monkeypatch.setattr(module, "index_shards", lambda new, folder, *, first, done: begun.append(first))
    for rank in range(3):
        with pytest.raises(UserError):  # nothing was indexed
            open_shards(paths, ranks=Ranks(rank, 3))
    assert begun == [0, 2, 4]
    order = []
    monkeypatch.setattr(module, "load_index", lambda path, folder: order.append(path))
    index_shards(paths, first=4)
    assert order == [*paths[4:], *paths[:4]]


def test_missing_empty_and_torn_shards_are_left_out_and_said(tmp_path):
    paths = write_samples(tmp_path, [4, 4, 4, 4])
    paths[0].unlink()
    paths[1].write_bytes(b"")
    data = paths[2].read_bytes()
    paths[2].write_bytes(data[: len(data) // 2])
    shards = open_shards(paths, max_bad=0.5)
    assert shards.counts[0] == shards.counts[1] == 0
    assert 0 < shards.counts[2] < 4
    assert shards.counts[3] == 4
    assert "1 shard missing or not to be opened; 1 shard empty file; 1 shard cut off" in shards.summary()
    with pytest.raises(UserError, match=r"3 shards of 4 missing or damaged, the first: .*00000\.tar.*data\.max_bad"):
        open_shards(paths, max_bad=0.4)
    with pytest.raises(UserError, match=r"3 shards of 4 missing or damaged.*data\.strict: false"):
        open_shards(paths, max_bad=0.5, strict=True)


def test_a_shard_that_is_mostly_bad_ends_the_run(tmp_path):
    members = [*sample("a"), *sample("b"), ("c.png", b"x"), ("d.png", b"x"), ("d.txt", "")]
    path = write_shard(tmp_path / "a.tar", members)
    assert open_shards([path], max_bad=0.5).summary() == "1 shard, 2 samples (2 with no caption left out)"
    with pytest.raises(UserError, match=r"a\.tar: 2 of 4 samples are bad \(2 with no caption\); .*raise data\.max_bad"):
        open_shards([path], max_bad=0.1)
    with pytest.raises(UserError, match=r"2 of 4 samples are bad .*data\.strict: false"):
        open_shards([path], strict=True)


def test_shards_without_any_sample_are_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no sample can be used of .*a\.tar \(missing"):
        open_shards([tmp_path / "a.tar"])
