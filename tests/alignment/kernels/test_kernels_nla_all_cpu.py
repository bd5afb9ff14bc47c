"""The NLA scores on a CPU against autograd through the plain formulas, and what they keep in memory."""

import pytest
import torch
from kernel_examples import CONFIGS, INSTANCES, TIED, assert_scores, gradients, instance, reference

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.kernels import nla_all_cpu as module
from powerclip.alignment.kernels.nla_all_cpu import nla_all_cpu, supports
from powerclip.alignment.score import score_all


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", INSTANCES)
def test_values_and_gradients_equal_plain_autograd(name, config):
    one, settings = INSTANCES[name](), CONFIGS[config]
    if name in TIED and settings.t2r and settings.largest_set:
        one.regions = one.regions[:, :1]
    plain = gradients(score_all, one, AlignmentConfig(**{**vars(settings), "backend": "reference"}), torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 5e-3)):
        # Float32 rounds Σ q/τ, thousands at τ = 0.001, and a softmax over nodes turns on the absolute error of that.
        for ours, expected in zip(gradients(nla_all_cpu, one, settings, dtype), plain, strict=True):
            assert_scores(ours, expected, tolerance)


@pytest.mark.parametrize("config", CONFIGS)
def test_float32_scores_are_accurate(config):
    one = INSTANCES["ragged, odd"]()
    assert_scores(nla_all_cpu(one.regions, one.nodes, one.segments, CONFIGS[config]), reference(one, CONFIGS[config]))


def test_tied_regions_share_the_gradient_of_the_best_one():
    one = instance([2], 3, 4)
    one.regions = one.regions[:, :1].expand(-1, 4, -1)
    config = AlignmentConfig(largest_set=1, r2t=False)
    _, of_regions, of_nodes = gradients(nla_all_cpu, one, config, torch.float64)
    torch.testing.assert_close(of_regions, of_regions[:, :1].expand(-1, 4, -1))
    one.regions = one.regions[:, :1]
    _, of_single, same_nodes = gradients(nla_all_cpu, one, config, torch.float64)
    torch.testing.assert_close(of_regions.sum(1, keepdim=True), of_single)
    torch.testing.assert_close(of_nodes, same_nodes)


@pytest.mark.parametrize("settings", [{"largest_set": 2}, {"region_sets": False}, {"aggregation": "exact"}])
def test_what_has_no_closed_form_here_is_said(settings):
    assert not supports(AlignmentConfig(**settings))


def test_blocks_of_images_give_the_same_scores_and_gradients(monkeypatch):
    one = INSTANCES["ragged, odd"]()
    whole = gradients(nla_all_cpu, one, CONFIGS["soft"], torch.float64)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 4 * len(one.nodes) * 10)
    for ours, expected in zip(gradients(nla_all_cpu, one, CONFIGS["soft"], torch.float64), whole, strict=True):
        assert_scores(ours, expected, 1e-12)


def test_nothing_of_the_size_of_the_similarities_is_kept_for_the_backward():
    one = instance([5] * 8, 16, 10)
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nla_all_cpu(one.regions.requires_grad_(), one.nodes.requires_grad_(), one.segments, CONFIGS["default"])
    assert sorted(kept) == sorted([one.regions.numel(), one.nodes.numel()])
