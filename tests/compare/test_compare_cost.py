"""Scores over what a run has cost by then: samples, seconds of training, operations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_run import tiny

from powerclip.compare.cost import RunCosts
from powerclip.compare.run import RunOptions, compare_study
from powerclip.compare.study import read_study
from powerclip.report.curves_page import curves_page
from powerclip.train.mfu import operations

ROWS = [
    {"step": 1, "samples_per_second": 2.0, "batch/tokens": 9.6},
    {"step": 4, "evaluate/retrieval/mean_recall": 0.25},
    {"step": 6, "samples_per_second": 4.0, "batch/tokens": 10.4},
    {"step": 10, "samples_per_second": 8.0, "batch/tokens": 10.0},
    {"step": 10, "evaluate/retrieval/mean_recall": 0.5},
]


def test_costs_are_those_of_the_steps_that_were_taken(tmp_path):
    recipe = tiny(tmp_path)  # batches of 4
    rows = RunCosts().add(ROWS, recipe, 0.5)
    early, late = (row for row in rows if "samples" in row)
    assert (early["samples"], late["samples"]) == (16, 40)
    assert (early["seconds"], late["seconds"]) == (2, 5)
    assert late["flops"] == pytest.approx(40 * operations(recipe, 10))
    assert early["flops"] == pytest.approx(late["flops"] * 16 / 40)


def test_a_run_that_shared_its_gpu_has_no_seconds(tmp_path):
    rows = RunCosts().add(ROWS, tiny(tmp_path), None)
    assert not any("seconds" in row for row in rows)
    assert sum("flops" in row for row in rows) == 2


def test_a_run_without_evaluations_is_left_as_it_is(tmp_path):
    assert RunCosts().add(ROWS[:1], tiny(tmp_path), 0.5) == ROWS[:1]


def test_scores_are_drawn_over_each_cost_and_averaged_step_by_step():
    seeds = [
        [
            {"step": step, "samples": 10 * step, "seconds": seconds * step, "evaluate/classification/acc1": step / 10}
            for step in (1, 2)
        ]
        for seconds in (1.0, 3.0)
    ]
    page = curves_page({"one": seeds})
    drawn = re.findall(r'aria-label="([^"]+)"', page)
    assert drawn == ["Zero-shot classification, top 1, %"] * 3  # no operations were counted
    assert "thousand samples" in page
    assert "PFLOPs" not in page
    assert "Scores during the runs" in page


def test_compare_draws_the_scores_of_evaluations_on_the_way(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        """
model:
  config:
    embed_dim: 16
    vision_cfg: {image_size: 16, patch_size: 8, width: 16, layers: 1, head_width: 8}
    text_cfg: {context_length: 40, vocab_size: 49408, width: 8, heads: 1, layers: 1}
regions: {count: 3}
optim: {warmup: 0}
train: {steps: 4, batch_size: 4, device: cpu, log_every: 1, checkpoint_every: 0, evaluate_every: 2}
evaluation: {scenes: 8}
"""
    )
    (tmp_path / "study.yaml").write_text(
        "base: base.yaml\nbaseline: clip\nsettings:\n  clip: {objective: clip}\n  powerclip: {}\n"
    )
    study = read_study([str(tmp_path / "study.yaml")])
    compare_study(study, tmp_path / "out", [0], RunOptions(quiet=True))
    page = (tmp_path / "out" / "curves.html").read_text()
    drawn = re.findall(r'aria-label="([^"]+)"', page)
    for title in ("Scenes: retrieval, %", "Scenes: zero-shot, %", "Scenes: pointing, %"):
        assert drawn.count(title) == 4  # over steps, samples, seconds and operations
    for axis in ("step", "thousand samples", "seconds", "PFLOPs, estimated"):
        assert f">{axis}</text>" in page
