"""Which implementation scores: chosen by device, forced by a setting, and the same results from each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from alignment_examples import random_parts

from powerclip.alignment import AlignmentConfig, alignment_loss
from powerclip.alignment.backends import choose_backend, triton_obstacle
from powerclip.alignment.score import score_all

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_device_decides_unless_the_setting_does():
    assert choose_backend(AlignmentConfig(), CPU) == "torch"
    assert choose_backend(AlignmentConfig(), GPU) == "triton"
    assert choose_backend(AlignmentConfig(region_sets=False), GPU) == "torch"  # no kernel knows these settings
    assert choose_backend(AlignmentConfig(backend="torch"), CPU) == "torch"
    assert choose_backend(AlignmentConfig(backend="reference"), GPU) == "reference"


def test_a_backend_that_is_not_there_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"backend: triton needs an NVIDIA GPU.*use auto, torch or reference"):
        choose_backend(AlignmentConfig(backend="triton"), CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        choose_backend(AlignmentConfig(backend="triton"), GPU)


def test_a_misspelt_backend_is_named():
    with pytest.raises(
        ValueError, match=r"'alignment.backend' must be auto \| reference \| torch \| triton, .*'triton'\?"
    ):
        AlignmentConfig(backend="tritn")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, None),
        ({"aggregation": "exact"}, None),
        ({"largest_set": 0}, None),
        ({"largest_set": 2}, "largest_set 0 and 1, not 2"),
        ({"region_sets": False}, "region_sets is false"),
        ({"t1": "gelu", "empty_set": True, "largest_set": 0}, "t1 softplus, not gelu"),
        ({"t2": "sigmoid", "empty_set": True}, "t2 tanh, not sigmoid"),
        ({"t1": "gelu", "empty_set": True, "largest_set": 0, "t2r": False}, None),
    ],
)
def test_what_the_kernels_do_not_know_is_named(settings, complaint):
    pytest.importorskip("triton")
    obstacle = triton_obstacle(AlignmentConfig(**settings), GPU)
    assert (complaint in obstacle) if complaint else obstacle is None


@pytest.mark.parametrize("negatives", ["hardest", "k", "all"])
@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("aggregation", ["nla", "exact"])
def test_torch_and_reference_give_the_same_loss_and_gradients(negatives, preset, aggregation):
    results = []
    for backend in ("reference", "torch"):
        parts = random_parts(9, 5, 16, seed=0)
        config = AlignmentConfig.named(preset, aggregation=aggregation, negatives=negatives, k=3, backend=backend)
        loss = alignment_loss(parts, config).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, [parts.regions, parts.nodes])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_on_a_cpu_the_closed_form_scores_where_it_supports_the_settings(monkeypatch):
    parts, scored = random_parts(4, 3, 8, seed=0), []

    def closed_form(regions, nodes, segments, config):
        scored.append(config)
        return torch.zeros(len(regions), len(segments))

    monkeypatch.setattr("powerclip.alignment.kernels.nla_all_cpu.nla_all_cpu", closed_form)
    settings = ({}, {"region_sets": False}, {"aggregation": "exact"}, {"backend": "reference"})
    configs = [AlignmentConfig(**setting) for setting in settings]
    for config in configs:
        score_all(parts.regions, parts.nodes, parts.segments, config)
    assert scored == configs[:1]


# Triton decides at its import whether it interprets: a process of its own.
BY_TRITON = """
import torch
from alignment_examples import random_parts
from powerclip.alignment import AlignmentConfig, alignment_loss
for settings in ({}, {"negatives": "k", "k": 3}, {"aggregation": "exact"}, {"largest_set": 0, "negatives": "hardest"},
                 {"aggregation": "exact", "similarity": "cosine", "largest_set": 0, "negatives": "hardest"}):
    results = []
    for backend in ("reference", "triton"):
        parts = random_parts(5, 3, 16, seed=1, dtype=torch.float32)
        loss = alignment_loss(parts, AlignmentConfig(**settings, tau=0.05, backend=backend)).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, [parts.regions, parts.nodes])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
"""


def test_triton_and_reference_give_the_same_loss_and_gradients():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", BY_TRITON], cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_triton_is_imported_only_where_it_runs():
    script = "import sys, powerclip.alignment.score; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
