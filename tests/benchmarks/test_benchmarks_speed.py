"""The speed benchmarks run where there is no GPU, and write what they promise."""

import json
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import alignment
import methods
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(name: str, folder: Path, *options: str) -> dict:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--tiny", "--output", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return result_in(folder)


@pytest.fixture
def run_here(monkeypatch):
    """The same in this process, for a second run of a script: its imports take longer than it does."""
    before = signal.getsignal(signal.SIGTERM)

    def run(name: str, folder: Path, *options: str) -> dict:
        command = [f"{name}.py", "--tiny", "--device", "cpu", "--output", str(folder), *options]
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        return result_in(folder)

    yield run
    signal.signal(signal.SIGTERM, before)


def result_in(folder: Path) -> dict:
    (result,) = folder.glob("*-tiny.json")  # never the name of a measurement
    return json.loads(result.read_text())


def test_alignment_measures_every_backend_that_is_there_and_says_why_others_are_not(tmp_path):
    rows = run("alignment", tmp_path)["rows"]
    for what in ("nla", "nla + gradient", "exact", "exact + gradient", "cosine", "cosine + gradient"):
        found = {row["backend"]: row for row in rows if row["what"] == what and row["size"]["regions"] == 4}
        assert found["reference"]["ms"] > 0
        assert found["torch"]["error"] < 1e-5
        assert found["triton"]["note"] == "needs a GPU"
    assert {row["sweep"] for row in rows} == {"M", "K", "C"}
    assert list(tmp_path.glob("*.png"))
    assert "| nla | torch | float32 |" in next(tmp_path.glob("*.md")).read_text()


def test_alignment_begins_no_row_when_its_time_is_over(tmp_path, run_here):
    rows = run_here("alignment", tmp_path, "--seconds", "0")["rows"]
    assert {row["note"] for row in rows} == {"left out: no time", "needs a GPU", "too slow"}
    assert not any(row["ms"] or row["target"] for row in rows)


def test_what_fails_is_a_row_with_a_note():
    row, cpu = alignment.Row("M", "exact", "torch", "float32", alignment.BASE), torch.device("cpu")

    def fail(problem: Exception) -> alignment.Row:
        def run() -> None:
            raise problem

        return alignment.timed(row, run, None, cpu, 2)

    assert fail(torch.OutOfMemoryError("CUDA out of memory. Tried …")).note == "out of memory"
    note = fail(ValueError("a | b " + 100 * "x" + "\nmore")).note
    assert note.startswith("ValueError: a / b xxx")
    assert len(note) == 80


def test_rows_are_held_against_their_targets():
    def target(what: str, ms: float | None, regions: int = 10) -> str:
        size = replace(alignment.BASE, regions=regions)
        return alignment.judged(alignment.Row("M", what, "triton", "float32", size, ms=ms)).target

    assert target("exact", 3.4) == "≤ 3.5 ms: met"
    assert target("exact", 3.6) == "≤ 3.5 ms: missed"
    assert target("exact", 80.0, regions=14) == "runs: met"
    assert target("exact", None, regions=14) == "runs: missed"
    assert target("nla", 1.0) == ""


def test_step_compares_open_clip_with_ours(tmp_path):
    trees = tmp_path / "trees.tsv"
    rows = (f"key{number}\t0\t(NP (NP (DT a) (NN dog)) (PP (IN on) (NP (DT a) (NN chair))))" for number in range(16))
    trees.write_text("\n".join(rows))
    result = run("step", tmp_path, "--rounds", "2", "--trees", str(trees))
    assert result["batch"]["mean K"] == 4
    names = [row["name"] for row in result["rows"]]
    assert names[:2] == ["open_clip CLIP, 77 tokens", "our CLIP"]
    assert all(row["ms"] > 0 and row["images_per_second"] > 0 for row in result["rows"])
    assert result["origin"]["torch"]
    assert result["origin"]["commit"]


def test_two_checkouts_take_turns_and_a_broken_one_ends_both(tmp_path):
    only = ("--only", "our CLIP", "--rounds", "2", "--repeats", "1")
    (row,) = run("step_versions", tmp_path, str(BENCHMARKS.parent), *only)["rows"]
    assert row["name"] == "our CLIP"
    assert [ratio > 0 for ratio in row["ratios"]] == [True, True]
    broken = tmp_path / "broken"
    (broken / "benchmarks").mkdir(parents=True)
    (broken / "benchmarks" / "step.py").write_text("raise SystemExit('no measure here')")
    command = [sys.executable, str(BENCHMARKS / "step_versions.py"), str(broken), "--tiny", *only]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert f"step.py of {broken} failed" in done.stderr


def test_evaluation_equals_clip_benchmarks(tmp_path):
    pytest.importorskip("clip_benchmark", reason="the extra `eval` is not installed")
    rows = run("evaluation", tmp_path)["rows"]
    assert [row["dataset"] for row in rows] == ["flickr8k test", "sugarcrepe", "imagenet sample"]
    assert all(row["largest_difference"] < 1e-6 and row["clip_benchmark_seconds"] > 0 for row in rows)


def test_training_with_its_data_is_measured_beside_the_step_alone(tmp_path):
    rounds = run("throughput", tmp_path)["rounds"]
    assert list(rounds) == ["with its data", "the step alone", "the data alone"]
    assert {len(rates) for rates in rounds.values()} == {2}
    assert all(rate > 0 for rates in rounds.values() for rate in rates)


def test_methods_are_measured_beside_clip_and_the_paper(tmp_path):
    rows = {row["method"]: row for row in run("methods", tmp_path)["rows"]}
    assert len(rows) == 8
    assert rows["clip"]["relative"] == 1
    assert (rows["filip"]["paper"], rows["flip"]["target"]) == (1.41, 0.6)
    assert all(row["turns"] >= 3 and not row["note"] for row in rows.values())


def test_methods_that_are_not_begun_in_time_are_left_out(tmp_path, run_here):
    rows = run_here("methods", tmp_path, "--only", "flip", "--seconds", "0")["rows"]
    assert {row["method"]: row["note"] for row in rows} == dict.fromkeys(("clip", "flip"), "left out: 0 s were over")


def test_a_method_that_fails_is_a_row_and_what_was_measured_stays_when_the_run_is_ended(tmp_path, monkeypatch):
    make_method = methods.make_method

    def sometimes(name, arguments):
        if name == "flip":
            raise torch.OutOfMemoryError
        if name == "filip":
            raise KeyboardInterrupt
        return make_method(name, arguments)

    monkeypatch.setattr(methods, "make_method", sometimes)
    command = ["methods.py", "--tiny", "--device", "cpu", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--only", "flip", "sparc", "filip"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            methods.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    (result,) = tmp_path.glob("*.json")
    rows = {row["method"]: row for row in json.loads(result.read_text())["rows"]}
    assert rows["flip"]["note"] == "out of memory"
    assert rows["sparc"]["relative"] > 0
    assert rows["filip"]["note"] == "left out: ended before"


@pytest.mark.parametrize("name", ["alignment", "cost", "methods", "step"])
def test_help_shows_the_commands(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert f"python benchmarks/{name}.py --tiny" in capsys.readouterr().out


def test_data_measures_open_clips_loader_and_ours_on_the_same_shards(tmp_path):
    result = run("data", tmp_path)
    loaders = {row["loader"]: row for row in result["rows"]}
    assert loaders["open_clip: images, tokens"]["relative"] == 1
    assert all(min(row["samples_per_second"]) > 0 for row in loaders.values())
    assert {"ours: + random boxes, phrases", "ours: + masks, phrases"} <= loaders.keys()
    assert result["memory"][-1]["samples"] == 40
