"""The benchmark of detectors: models are found by method and seed, gold boxes named, and means compared over seeds."""

from __future__ import annotations

import json

import pytest
import torch
from detection import NAMING, Task, find_models, measure_task, summarise

from powerclip.detect.recipe import DetectRecipe
from powerclip.encoders import build, save, tokenizer_for
from powerclip.errors import UserError

TOWERS = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "head_width": 8, "layers": 1},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}


def test_models_of_a_study_name_gold_boxes_and_what_is_done_is_not_done_again(tmp_path):
    torch.manual_seed(0)
    tower = build(config=TOWERS)
    for method in ("b", "a"):
        save(tower, tmp_path / method / "seed-3" / "model", tokenizer_for(tower))
    models = find_models(tmp_path, ["b", "a"])
    assert [(method, seed) for method, seed, _ in models] == [("b", 3), ("a", 3)]
    said: list[str] = []
    recipe = DetectRecipe(str(models[0][2]), scenes=6, size=32, steps=1, warmup=0)
    task = Task("b", 3, models[0][2], tmp_path / "out", recipe, "scenes", (), only_names=True)
    found = measure_task(task, said.append)
    assert {"region_base", "crop_novel", "image_base_mean"} <= set(found) & set(NAMING)
    assert json.loads(task.measured.read_text()) == found
    assert measure_task(task, said.append) == found
    assert len(said) == 1
    with pytest.raises(UserError, match="no METHOD/seed-N/model"):
        find_models(tmp_path, ["c"])


def test_the_table_has_means_over_seeds_and_the_paired_test_of_the_first_two_methods(tmp_path):
    runs = {(m, s): {"ap50": 0.1 + 0.01 * s + 0.05 * (m == "ours")} for m in ("clip", "ours") for s in range(3)}
    runs["ours", 2]["ap50"] += 0.01
    page = summarise(runs, tmp_path, {"steps": 5})
    row = next(line for line in page.splitlines() if line.startswith("| ap50 |"))
    assert "11.00 ± 1.00 | 16.33 ± 1.53" in row
    assert float(row.split("|")[-2]) < 0.01
    assert len(json.loads((tmp_path / "detection.json").read_text())["runs"]) == 6
