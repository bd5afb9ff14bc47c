"""The benchmark of the parsers runs without data, and writes what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parsers.py"


def test_parsers_measures_captions_per_second_without_data(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--tiny", "--threads", "1", "--parsers", "embedded", "flat"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("*.json")
    rows = {row["parser"]: row for row in json.loads(result.read_text())["speed"]}
    assert rows["embedded"]["captions_per_second"] > 0
    assert rows["embedded"]["nodes"] > rows["flat"]["nodes"] == 1
    assert "| embedded | 1 CPU thread |" in next(tmp_path.glob("*.md")).read_text()
