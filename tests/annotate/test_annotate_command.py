"""`powerclip annotate` as it is typed: counts that are right, one line for what is wrong, and a status that adds up."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from annotate_examples import make_shard, make_shards, photo
from mini_corpus import write_shard
from rich.console import Console

from powerclip import cli
from powerclip.annotate.job import parse_settings
from powerclip.annotate.pipeline import ShardResult, State
from powerclip.annotate.run_shards import ShardProgress
from powerclip.annotate.writer import remove_abandoned
from powerclip.data.sidecar import read_regions, read_trees
from powerclip.errors import UserError
from powerclip.runtime.progress import Progress


@pytest.fixture
def powerclip(monkeypatch, capsys):
    """Runs a command in this process; gives its exit code, and what it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["powerclip", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        else:
            code = 0
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_trees_are_annotated_skipped_and_redone_with_counts(powerclip, tmp_path):
    shards = make_shards(tmp_path / "shards", 3)
    command = ["annotate", "trees", *shards, "--parser", "flat", "--sidecars", tmp_path / "side", "-w", 1]
    assert powerclip(*command) == (0, "trees: 3 shards annotated\n  9 samples with 18 captions\n")
    assert powerclip(*command) == (0, "trees: 3 shards done already\n")
    make_shard(Path(shards[0]), [["other"], ["cat 1", "a dog number 0"], ["a dog number 0", "cat 2"]])
    (tmp_path / "side" / "001.trees.parquet").write_bytes(b"torn")
    code, text = powerclip(*command)
    assert (code, text.splitlines()) == (
        0,
        [
            "trees: 1 shard done already, 2 shards annotated again",
            "  6 samples with 11 captions, 1 of them unchanged and kept",
            "  annotated again: 1 shard, tar changed",
            "  annotated again: 1 shard, sidecar torn or of another format",
        ],
    )
    assert powerclip(*command, "--quiet") == (0, "")


def test_bad_tars_are_named_and_do_not_stop_the_others(powerclip, tmp_path):
    shards = make_shards(tmp_path, 2)
    whole = Path(shards[1]).read_bytes()
    Path(shards[1]).write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "002.tar").touch()
    code, text = powerclip("annotate", "trees", f"{tmp_path}/{{000..003}}.tar", "--parser", "flat", "-w", 1)
    assert code == 1
    assert "2 shards annotated, 2 shards failed" in text
    assert "002.tar: empty file" in text
    assert "003.tar: missing" in text
    assert "001.tar: cut off; annotated up to there" in text
    assert 0 < len(read_trees(tmp_path / "001.trees.parquet")) < 3


def test_regions_come_from_superpixels_without_any_option(powerclip, tmp_path):
    shards = make_shards(tmp_path, 1)
    code, text = powerclip("annotate", "regions", *shards, "-w", 1, "--set", "most=3")
    assert code == 0
    assert "regions: 1 shard annotated" in text
    assert 0 < len(read_regions(tmp_path / "000.regions.parquet").masks("00001", photo(1))) <= 3


def test_status_says_what_is_covered_and_what_fell_back(powerclip, tmp_path):
    shards = make_shards(tmp_path, 2)
    write_shard(tmp_path / "002.tar", [("a.jpg", photo()), ("a.txt", "…"), ("b.jpg", b"torn"), ("b.txt", "a dog")])
    assert powerclip("annotate", "trees", tmp_path, "--parser", "flat", "-w", 1)[0] == 0
    assert powerclip("annotate", "regions", *shards, tmp_path / "002.tar", "-w", 1)[0] == 0
    os.utime(shards[1], ns=(1, 1))
    code, text = powerclip("annotate", "status", tmp_path)
    assert code == 0
    trees, regions = text.split("regions:")
    assert "trees: 2 of 3 shards annotated (66.7 %)" in trees
    assert "to be annotated again: 1, tar changed" in trees
    assert "by flat 1" in trees
    assert "5 samples, 8 captions, 0.9 phrases each" in trees
    assert "flat trees: 1 (12.5 %): 1 empty" in trees
    assert "bytes a sample" in trees
    assert "2 of 3 shards annotated" in regions
    assert "samples without masks: 1 (20 %): 1 image not readable" in regions
    assert "a mask" in regions


def test_status_finds_sidecars_in_their_own_folder(powerclip, tmp_path):
    shards = make_shards(tmp_path / "shards", 2)
    side = tmp_path / "side"
    powerclip("annotate", "trees", *shards, "--parser", "flat", "-w", 1, "--sidecars", side)
    (tmp_path / "shards" / "002.tar").touch()
    assert "trees: 2 of 2 shards annotated (100 %)" in powerclip("annotate", "status", side)[1]
    by_shards = powerclip("annotate", "status", tmp_path / "shards", "--sidecars", side)[1]
    assert "trees: 2 of 3 shards annotated (66.7 %)" in by_shards
    assert "regions: 0 of 3 shards annotated (0 %)" in by_shards


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trees", "nowhere/*.tar"], "nothing matches nowhere/*.tar"),
        (["trees", "SHARD", "--parser", "embeded"], "did you mean 'embedded'?"),
        (["regions", "SHARD", "--segmenter", "sam"], "there are superpixels, mobile_sam, sam2, coco"),
        (["regions", "SHARD", "--segmenter", "mobile_sam"], "give the weights file with --weights"),
        (["regions", "SHARD", "--weights", "mobile_sam.pt"], "superpixels takes no weights"),
        (["regions", "SHARD", "--set", "most"], "write NAME=NUMBER, such as points=32"),
        (["regions", "SHARD", "--set", "mots=3"], "did you mean 'most'?"),
        (["trees", "SHARD", "--engine", "rai"], "did you mean 'ray'?"),
        (["trees", "SHARD", "--address", "auto"], "--address is for --engine ray"),
        (["trees", "s3://bucket/0.tar"], "give --sidecars DIR"),
        (["trees", "SHARD", "--parser", "flat", "--sidecars", "SHARD"], "File exists"),
        (["status", "EMPTY"], "holds neither sidecars nor tars"),
        (["status", "nowhere"], "there is neither nowhere nor a sidecar of it"),
    ],
)
def test_what_is_typed_wrong_is_one_line_and_exit_code_2(powerclip, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    paths = {"SHARD": make_shards(tmp_path / "shards", 1)[0], "EMPTY": tmp_path / "empty"}
    more = [] if arguments[0] == "status" else ["-w", 1]
    code, text = powerclip("annotate", *(paths.get(argument, argument) for argument in arguments), *more)
    assert code == 2
    assert message in text
    assert text.startswith("powerclip: error: ")
    assert text.count("\n") == 1


def test_ctrl_c_is_exit_code_130_and_says_how_to_go_on(powerclip, tmp_path, monkeypatch):
    shards = make_shards(tmp_path, 3)
    stop = "powerclip.annotate.run_shards.StopOnInterrupt.__call__"
    monkeypatch.setattr(stop, lambda self: bool(list(tmp_path.glob("*.parquet"))))
    code, text = powerclip("annotate", "trees", *shards, "--parser", "flat", "-w", 1)
    assert code == 130
    assert "trees: 1 shard annotated" in text
    assert "interrupted; the same command goes on with the shards that are left" in text


def test_settings_are_numbers():
    assert parse_settings(["points=32", " quality = 0.5", "most=1e1"]) == {"points": 32, "quality": 0.5, "most": 10}
    for wrong in ("points", "points=", "points=many", "=3x", "points=inf"):
        with pytest.raises(UserError, match="NAME=NUMBER"):
            parse_settings([wrong])


def test_what_a_killed_process_left_is_removed_but_not_what_is_being_written(tmp_path):
    for name in (".0.trees.parquet.123.partial", ".1.trees.parquet.124.partial", "0.trees.parquet", ".other"):
        (tmp_path / name).touch()
    os.utime(tmp_path / ".0.trees.parquet.123.partial", (1, 1))
    os.utime(tmp_path / ".other", (1, 1))
    assert remove_abandoned(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".1.trees.parquet.124.partial",
        ".other",
        "0.trees.parquet",
    ]


# ---- progress --------------------------------------------------------------------------------------------------------


def test_rate_and_time_left_count_shards_that_have_begun_and_not_those_that_were_done(clock, capsys):
    bar = Progress("trees", 5, unit="shards", every=0, console=Console(width=100))
    progress = ShardProgress(bar)
    progress.on_result(ShardResult("0", State.DONE, samples=100))
    assert bar.remaining is None
    clock.now = 10.0
    progress.on_samples("1", 100, 100)
    progress.on_result(ShardResult("1", State.NEW, samples=100))
    capsys.readouterr()
    progress.on_samples("2", 50, 100)
    # 1.5 shards took 10 s; 2.5 of 5 are left (one was done, one is half done)
    assert bar.remaining == pytest.approx(10 * 2.5 / 1.5)
    assert capsys.readouterr().out == "trees  shards 2/5  150 samples  15/s  eta 0:00:17\n"


def test_captions10k_is_annotated_completely(powerclip, real_data, tmp_path):
    shard = real_data / "captions10k" / "val-000.tar"
    assert powerclip("annotate", "trees", shard, "--parser", "flat", "--sidecars", tmp_path, "-w", 1)[0] == 0
    assert "1,000 samples, 5,000 captions" in powerclip("annotate", "status", tmp_path)[1]
    trees = read_trees(tmp_path / "val-000.trees.parquet")
    assert len(trees) == 1000
    assert json.dumps(trees.info.annotator.options) == "{}"
