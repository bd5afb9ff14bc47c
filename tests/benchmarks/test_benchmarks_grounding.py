"""The benchmark of grounding: a study is trained and measured into one table, and what is done is not done again."""

from __future__ import annotations

import gzip
import json
import os

import grounding
import pytest
from mini_corpus import write_mini_corpus
from tiny_run import write_tiny

STUDY = """
base: {recipe}
baseline: clip
settings:
  clip: {{objective: clip}}
  one: {{alignment: {{largest_set: 1}}}}
"""
SQUARE = {"start": 0, "end": 12, "boxes": [[0.0, 0.0, 0.6, 1.0]]}
WALL = {"start": 16, "end": 22, "boxes": [[0.6, 0.0, 1.0, 0.4]]}
LAMPS = {"start": 27, "end": 36, "boxes": [[0.6, 0.4, 0.8, 1.0], [0.8, 0.4, 1.0, 1.0]]}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of two methods, and the folder with the data that it is measured on."""
    corpus = write_mini_corpus(tmp_path / "data" / "captions10k")
    lines = [
        {
            "key": f"sample{number:03d}",
            "caption": "a red square on a wall and two lamps",
            "phrases": [SQUARE, WALL, LAMPS],
        }
        for number in range(12, 18)
    ]
    (tmp_path / "data" / "grounding").mkdir()
    phrases = tmp_path / "data" / "grounding" / "flickr8k-val.jsonl.gz"
    phrases.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    item = {"filename": "sample012.png", "caption": "a red square", "negative_caption": "a blue square", "kind": "att"}
    (tmp_path / "negatives.json").write_text(json.dumps({"0": item}))
    recipe = write_tiny(tmp_path)
    data = {"source": "corpus", "shards": f"{corpus}/train-*.tar", "trees": f"{corpus}/trees.tsv"}
    recipe.write_text(recipe.read_text() + f"data: {json.dumps(data)}\n")
    (tmp_path / "study.yaml").write_text(STUDY.format(recipe=recipe))
    monkeypatch.setenv("POWERCLIP_DATA", str(tmp_path / "data"))
    return tmp_path / "study.yaml"


def test_a_study_is_trained_and_measured_once(study, monkeypatch):
    output = study.parent / "runs"
    arguments = [str(study), "train.steps=2", "--seeds", "1", "-o", str(output)]
    arguments += ["--negatives", str(study.parent / "negatives.json")]
    monkeypatch.setattr("sys.argv", ["grounding.py", *arguments])
    grounding.main()
    table = (output / "grounding.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in table.splitlines() if line.startswith("| ")}
    assert list(rows) == ["%", "chance", "fixed patch", "order alone", "all boxes", "untrained", "clip", "one"]
    assert all(cell.strip() for cell in rows["one"])
    kept = json.loads((output / "grounding.json").read_text())["runs"]["one"]["0"]
    assert kept["flickr8k-val"]["pointing_chance"] == pytest.approx((2 + 1 + 1) / 3 / 4)  # patches in boxes, of four

    models = sorted(output.glob("*/seed-0/model/open_clip_model.safetensors"))
    written = [os.stat(path).st_mtime_ns for path in models]
    assert len(written) == 3
    grounding.main()
    assert [os.stat(path).st_mtime_ns for path in models] == written
    assert (output / "grounding.md").read_text() == table
