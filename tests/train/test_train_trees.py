"""Trees of a run: the parser makes those that are missing, once; what would leave captions flat is refused."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import same_weights, tiny
from typer.testing import CliRunner

from powerclip.annotate.job import Job
from powerclip.annotate.parsers import load_parser
from powerclip.annotate.pipeline import State
from powerclip.annotate.tree_annotator import TreeAnnotator
from powerclip.cli import app
from powerclip.data.sidecar import read_info, read_trees
from powerclip.data.table_parts import open_tables
from powerclip.errors import UserError
from powerclip.train import trees as run_trees
from powerclip.train.dry_run import dry_run
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.trees import prepare_trees

sys.path.append(str(Path(__file__).parents[1] / "data"))
from shard_examples import encoded, ramp, write_samples


def write_table(folder: Path, count: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["image,caption,split"]
    for number in range(count):
        (folder / f"{number}.png").write_bytes(encoded(ramp(24, 18, number)))
        lines.append(f"{number}.png,a dog sitting on red chair number {number},train")
    path = folder / "captions.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(table: Path, *more: str) -> list[str]:
    return ["data.source=table", f"data.table={table}", "train.steps=4", "data.workers=0", *more]


def nodes(run: Path) -> float:
    return list(read_metrics(run / "metrics.jsonl"))[-1]["batch/nodes"]


def test_a_run_on_a_table_parses_its_captions_once_and_says_so(tmp_path, capsys):
    table = write_table(tmp_path / "data")
    train(tiny(tmp_path, *settings(table)), tmp_path / "first")
    said = capsys.readouterr().out.replace("\n", " ")
    assert "12 images, 12 captions; image: image, captions: caption (guessed)" in said
    assert "12 captions parsed now by the embedded parser" in said
    assert nodes(tmp_path / "first") > 2
    assert (tmp_path / "data" / "captions.csv#00000.trees.parquet").is_file()
    train(tiny(tmp_path, *settings(table)), tmp_path / "second")
    assert "trees of the sidecars beside the data" in capsys.readouterr().out.replace("\n", " ")
    assert same_weights(tmp_path / "first", tmp_path / "second")  # parsing changes nothing else


def test_captions_that_were_edited_are_parsed_again_and_the_others_kept(tmp_path):
    table = write_table(tmp_path)
    names = [str(path) for path in open_tables([table]).paths]
    prepare_trees(names, None)
    table.write_text(table.read_text().replace("a dog sitting on red chair number 3", "a cat"))
    assert "12 captions parsed now" in prepare_trees(names, None).note
    sidecar = read_trees(Path(f"{names[0]}.trees.parquet"))
    assert [span.label for span in sidecar.spans("3.png", "a cat")] == ["NP"]
    assert "sidecars beside" in prepare_trees(names, None).note


def test_what_cannot_be_written_beside_the_data_is_kept_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(run_trees, "is_writable", lambda folder: False)
    table = write_table(tmp_path / "data")
    names = [str(path) for path in open_tables([table]).paths]
    made = prepare_trees(names, None)
    assert made.folder is not None
    assert made.folder.is_relative_to(tmp_path / "cache" / "powerclip" / "trees")
    assert prepare_trees(names, None).note == f"trees of the sidecars in {made.folder}"
    assert not list((tmp_path / "data").glob("*.parquet"))


def test_a_run_on_shards_parses_what_no_other_parser_has(tmp_path, capsys):
    first, second = write_samples(tmp_path / "shards", [6, 6])
    Job("trees", "flat").load().annotate(str(first))
    recipe = tiny(tmp_path, "data.source=shards", f"data.shards={tmp_path}/shards/*.tar", "train.steps=2")
    train(recipe, tmp_path / "run")
    assert "6 captions parsed now" in capsys.readouterr().out.replace("\n", " ")
    made_by = [read_info(shard.with_suffix(".trees.parquet")).annotator.name for shard in (first, second)]
    assert made_by == ["flat", "embedded"]


@pytest.mark.parametrize("source", ["shards", "table"])
def test_an_objective_that_would_get_one_phrase_a_caption_is_refused(tmp_path, source):
    if source == "shards":
        shards = list(map(str, write_samples(tmp_path / "data", [6, 6])))
        where = f"data.shards={tmp_path}/data/*.tar"
    else:
        table = write_table(tmp_path / "data")
        shards, where = [str(path) for path in open_tables([table]).paths], f"data.table={table}"
    annotator = TreeAnnotator(load_parser("flat"))
    for shard in shards:
        annotator.annotate(shard)
    recipe = tiny(tmp_path, f"data.source={source}", where, "train.steps=2")
    with pytest.raises(
        UserError, match=r"--parser flat\); make them with `powerclip annotate trees '.*data\.trees: flat"
    ):
        train(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_captions_that_no_parser_reads_are_refused(tmp_path):
    table = write_table(tmp_path)
    table.write_text("image,caption\n" + "".join(f"{number}.png,собака сидит на стуле\n" for number in range(12)))
    with pytest.raises(UserError, match=r"none of 12 captions .* 12 of them left flat.* are they English"):
        train(tiny(tmp_path, *settings(table)), tmp_path / "run", quiet=True)


def test_processes_that_start_together_parse_a_shard_once(tmp_path):
    (shard,) = write_samples(tmp_path, [200])
    annotators = [TreeAnnotator(load_parser("embedded", "cpu")) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:  # the lock belongs to who opened the file, thread or process
        states = [result.state for result in pool.map(lambda one: one.annotate(str(shard)), annotators)]
    assert sorted(states) == sorted([State.NEW, State.DONE])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.tar", "00000.trees.parquet"]


def test_a_dry_run_knows_the_trees_and_the_length_of_a_table(tmp_path):
    table = write_table(tmp_path)
    lines = {}
    for trees in ("null", "sidecars"):
        printed = io.StringIO()
        recipe = tiny(tmp_path, *settings(table, "train.steps=6", f"data.trees={trees}"))
        dry_run(recipe, tmp_path / "run", console=Console(file=printed, width=200))
        lines[trees] = printed.getvalue()
        assert "6 steps × 4 pairs = 24 pairs, 2 epochs of 12" in lines[trees]
    assert "trees: sidecars where there are some, the embedded parser for the rest" in lines["null"]
    assert "trees: MISSING: data.sidecars: no shard has its trees beside them" in lines["sidecars"]


def test_tables_can_be_annotated_ahead(tmp_path):
    table = write_table(tmp_path)
    for command, expected in (
        (["annotate", "trees", str(table)], "trees: 1 shard annotated"),
        (["annotate", "regions", str(table)], "regions: 1 shard annotated"),
        (["annotate", "regions", str(table)], "regions: 1 shard done already"),
        (["annotate", "status", str(table)], "12 samples, 12 captions"),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert expected in done.output
    recipe = tiny(tmp_path, *settings(table, "regions.kind=segments", "regions.count=2"))
    result = train(recipe, tmp_path / "run", quiet=True)
    assert not any(row.get("regions/stale") for row in read_metrics(result.folder.metrics))
