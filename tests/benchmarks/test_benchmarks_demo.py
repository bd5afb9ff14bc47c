"""The benchmark of the live page starts a server, asks it from several clients and writes what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the page needs the extra demo")
pytest.importorskip("httpx", reason="the clients need httpx")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "demo.py"


def test_it_counts_answers_and_measures_memory(tmp_path):
    command = [sys.executable, SCRIPT, "--tiny", "--keys", "0", "--output", tmp_path]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("*-demo-cpu.json")
    crowd = json.loads(result.read_text())["crowd"]
    assert crowd["clients"] == 2
    assert crowd["answers"] > 0
    assert crowd["errors"] == 0
    assert crowd["MiB at the end"] > 0
