"""The benchmark of segmenters runs where there is no GPU, and writes what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mini_corpus import sample, write_shard

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "segmenters.py"


def test_it_counts_images_masks_areas_and_bytes(tmp_path):
    members = [member for number in range(3) for member in sample(f"{number}", "red", ["a red square"])]
    shard = write_shard(tmp_path / "0.tar", members)
    command = [sys.executable, SCRIPT, shard, "--segmenter", "superpixels", "--limit", "2", "--output", tmp_path]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("*.json")
    (row,) = json.loads(result.read_text())["results"]
    assert (row["images"], row["masks/image"], row["without a mask, %"]) == (2, 0, 100)  # even images have none
    assert "| images/s |" in next(tmp_path.glob("*.md")).read_text()
