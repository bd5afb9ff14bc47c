"""The speed benchmarks run where there is no GPU, and write what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, folder: Path) -> dict:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--tiny", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (result,) = folder.glob("*.json")
    return json.loads(result.read_text())


def test_alignment_measures_every_backend_that_is_there_and_says_why_others_are_not(tmp_path):
    rows = run("alignment", tmp_path)["rows"]
    for what in ("nla", "nla + gradient", "exact"):
        found = {row["backend"]: row for row in rows if row["what"] == what and row["size"]["regions"] == 4}
        assert found["reference"]["ms"] > 0
        assert found["torch"]["error"] < 1e-5
        assert found["triton"]["note"] == "needs a GPU"
    assert {row["sweep"] for row in rows} == {"M", "K", "C"}
    assert any(row["what"] == "monte carlo" and row["ms"] for row in rows)
    assert list(tmp_path.glob("*.png"))
    assert "| nla | torch | float32 |" in next(tmp_path.glob("*.md")).read_text()


def test_step_compares_open_clip_with_ours(tmp_path):
    result = run("step", tmp_path)
    names = [row["name"] for row in result["rows"]]
    assert names[:2] == ["open_clip CLIP, 77 tokens", "our CLIP"]
    assert all(row["ms"] > 0 and row["images_per_second"] > 0 for row in result["rows"])
    assert result["origin"]["torch"]
    assert result["origin"]["commit"]


def test_evaluation_equals_clip_benchmarks(tmp_path):
    pytest.importorskip("clip_benchmark", reason="the extra `eval` is not installed")
    rows = run("evaluation", tmp_path)["rows"]
    assert [row["dataset"] for row in rows] == ["flickr8k test", "sugarcrepe", "imagenet sample"]
    assert all(row["largest_difference"] < 1e-6 and row["clip_benchmark_seconds"] > 0 for row in rows)


def test_methods_are_measured_beside_clip_and_the_paper(tmp_path):
    rows = {row["method"]: row for row in run("methods", tmp_path)["rows"]}
    assert len(rows) == 8
    assert rows["clip"]["relative"] == 1
    assert (rows["filip"]["paper"], rows["flip"]["target"]) == (1.41, 0.6)


@pytest.mark.parametrize("name", ["alignment", "step"])
def test_help_shows_the_commands(name):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert f"python benchmarks/{name}.py --tiny" in done.stdout


def test_data_measures_open_clips_loader_and_ours_on_the_same_shards(tmp_path):
    result = run("data", tmp_path)
    loaders = {row["loader"]: row for row in result["rows"]}
    assert loaders["open_clip: pictures, tokens"]["relative"] == 1
    assert all(min(row["samples_per_second"]) > 0 for row in loaders.values())
    assert {"ours: + random boxes, phrases", "ours: + masks, phrases"} <= loaders.keys()
    assert result["memory"][-1]["samples"] == 40
