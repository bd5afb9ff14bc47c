"""Evaluation under torchrun: two processes share the work and give one process's numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_examples import caption_table, class_folders, image, sugarcrepe, tiny_model
from mini_corpus import write_shard

import powerclip
from powerclip.errors import UserError
from powerclip.evaluate import embedder as embedding
from powerclip.evaluate.runner import evaluate_model
from powerclip.runtime.distributed import Ranks, choose_device

ROOT = Path(powerclip.__file__).parents[1]


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "-m", "powerclip", "evaluate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def results(folder: Path) -> dict[str, list[tuple[str, dict[str, float]]]]:
    """File → dataset and metrics of each record."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        records = content if isinstance(content, list) else [content]
        found[path.name] = [(record["dataset"], record["metrics"]) for record in records]
    return found


def test_two_processes_give_the_numbers_of_one(tmp_path):
    powerclip.save(tiny_model()[0], tmp_path / "model")
    # More images than one chunk and more texts than one batch: both ranks have work.
    animals, table, crepe = (
        class_folders(tmp_path / "animals", 75),
        caption_table(tmp_path / "table", 150),
        sugarcrepe(tmp_path / "crepe"),
    )
    assert len(list(animals.rglob("*.png"))) > embedding.CHUNK
    assert len(table.read_text().splitlines()) > embedding.BATCH
    boxes = tmp_path / "table" / "boxes.json"
    items = [
        {"image": f"photos/{number}.png", "caption": "a bear and a cup", "phrase": "a cup", "box": [9, 9, 30, 30]}
        for number in range(20)
    ]
    boxes.write_text(json.dumps(items))
    count = embedding.CHUNK + 10
    lines = [
        {"key": f"g{number}", "caption": "a bear and two cups", "phrases": [
            {"start": 0, "end": 6, "boxes": [[0.1 * (number % 4), 0, 0.5, 0.5]]},
            {"start": 11, "end": 19, "boxes": [[0.6, 0, 1, 0.4], [0.5, 0.6, 1, 1]]}]}
        for number in range(count)
    ]  # fmt: skip
    grounding = tmp_path / "phrases.jsonl"
    grounding.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shard = write_shard(
        tmp_path / "g.tar",
        [(f"g{number}.png", image(tmp_path / "drawn.png", number).read_bytes()) for number in range(count)],
    )
    (tmp_path / "empty").mkdir()
    paths = [animals, tmp_path / "empty", table, crepe]
    done = torchrun(
        *paths, "--pointing", boxes, "--grounding", grounding, "--images", shard,
        "-m", tmp_path / "model", "-o", tmp_path / "two", "--device", "cpu"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[1/6] animals") == 1  # the first rank speaks for both
    assert "[2/6] empty: failed" in done.stdout
    evaluate_model(
        str(tmp_path / "model"), paths, pointing=[boxes], grounding=[grounding], images=[shard],
        output=tmp_path / "one", device="cpu", cache=False, quiet=True
    )  # fmt: skip
    assert results(tmp_path / "two") == results(tmp_path / "one")
    assert len(results(tmp_path / "two")) == 5


def test_under_torchrun_a_mistake_is_still_one_line(tmp_path):
    done = torchrun("--model", "gone", "--suite", "retreival", "--data", tmp_path)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("powerclip: error:")]
    assert len(said) == 1
    assert "did you mean 'retrieval'" in said[0]


def test_under_torchrun_data_that_cannot_be_evaluated_are_said_once(tmp_path):
    powerclip.save(tiny_model()[0], tmp_path / "model")
    animals = class_folders(tmp_path / "animals", 1)
    for path in animals.rglob("*.png"):
        path.write_bytes(b"no image")
    done = torchrun(animals, "--model", tmp_path / "model", "-o", tmp_path / "out", "--device", "cpu")
    assert done.returncode != 0
    assert done.stdout.count("[1/1] animals: failed; 13 of 13 images cannot be read") == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("powerclip: error:")]
    assert len(said) == 1
    assert "no dataset could be evaluated: 13 of 13 images cannot be read" in said[0]


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="more processes on this machine than it has GPUs"):
        choose_device("auto", Ranks(2, 3, local=2), setting="--device")
    with pytest.raises(UserError, match="--device: 'gpu' is not a device"):
        choose_device("gpu", setting="--device")
