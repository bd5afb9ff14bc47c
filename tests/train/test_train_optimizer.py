"""The optimiser's groups and the learning rate's course."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_run import tiny

from powerclip.train.optimizer import learning_rate
from powerclip.train.sections import OptimSection
from powerclip.train.state import start


def test_gains_biases_and_scales_do_not_decay_and_everything_is_trained_once(tmp_path):
    state = start(tiny(tmp_path))
    decay = {id(p): group["weight_decay"] for group in state.optimizer.param_groups for p in group["params"]}
    named = {**dict(state.encoder.named_parameters()), **dict(state.objective.named_parameters())}
    assert set(decay) == {id(p) for p in named.values()}
    assert sum(len(group["params"]) for group in state.optimizer.param_groups) == len(named)
    for name, parameter in named.items():
        free = name.endswith("bias") or ".ln_" in name or "scale" in name or parameter.ndim < 2
        assert decay[id(parameter)] == (0.0 if free else 0.2), name


def test_the_rate_rises_in_a_line_then_falls_as_a_cosine_to_zero():
    optim = OptimSection(lr=0.5, warmup=4)
    rates = [learning_rate(step, 104, optim) for step in range(105)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[4] == 0.5
    assert rates[54] == pytest.approx(0.25)
    assert rates[104] == pytest.approx(0.0)
    assert all(a >= b for a, b in pairwise(rates[4:]))


def test_a_constant_schedule_stays():
    assert learning_rate(90, 100, OptimSection(lr=0.5, schedule="constant")) == 0.5


def test_the_same_seed_draws_the_same_weights_and_another_seed_others(tmp_path):
    def first(*overrides: str) -> torch.Tensor:
        return start(tiny(tmp_path, *overrides)).encoder.clip.text_projection.detach()

    assert torch.equal(first(), first())
    assert not torch.equal(first(), first("train.seed=1"))
