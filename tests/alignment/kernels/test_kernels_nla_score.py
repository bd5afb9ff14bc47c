"""The fused NLA kernel against the formulas in float64: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
from kernel_examples import CONFIGS, INSTANCES, assert_scores, instance, reference

from powerclip.alignment.kernels.nla_score import nla_score

BOTH_TILES = ("default", "paper")  # without ∅ and with it: on a GPU a tile has 256 nodes and 128


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", INSTANCES)
def test_scores_equal_the_reference(name, config):
    one = INSTANCES[name]()
    scores = nla_score(one.regions, one.nodes, one.segments, CONFIGS[config])
    assert scores.dtype == torch.float32
    assert_scores(scores, reference(one, CONFIGS[config]))


@pytest.mark.parametrize("config", BOTH_TILES)
def test_tiles_for_a_gpu_end_where_nodes_and_images_do(config):
    one = instance([64, 63, 1, 64, 64, 5], 17, 3)
    scores = nla_score(one.regions, one.nodes, one.segments, CONFIGS[config])
    assert_scores(scores, reference(one, CONFIGS[config]))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("count", [3, 6, 15, 16, 19, 36])
def test_any_number_of_regions_is_taken_in_parts(count):
    one = instance([2, 3], 3, count)
    for config in CONFIGS.values():
        assert_scores(nla_score(one.regions, one.nodes, one.segments, config), reference(one, config))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("config", ["soft", "very soft"])
def test_parts_without_a_positive_similarity_join(config):
    one = instance([2, 3], 3, 36)
    one.regions, one.nodes = one.regions.abs(), -one.nodes.abs()
    scores = nla_score(one.regions, one.nodes, one.segments, CONFIGS[config])
    assert_scores(scores, reference(one, CONFIGS[config]))


@pytest.mark.usefixtures("small_tiles")
def test_bf16_inputs_lose_nothing_but_their_own_rounding():
    one = instance([3, 1, 6], 9, 5, width=64)
    one.regions, one.nodes = one.regions.bfloat16(), one.nodes.bfloat16()
    scores = nla_score(one.regions, one.nodes, one.segments, CONFIGS["default"])
    assert_scores(scores, reference(one, CONFIGS["default"]))


@pytest.mark.usefixtures("small_tiles")
def test_blocks_of_images_give_the_same_scores(monkeypatch):
    one = instance([3, 1, 6], 21, 5)
    whole = nla_score(one.regions, one.nodes, one.segments, CONFIGS["default"])
    monkeypatch.setattr("powerclip.alignment.kernels.nla_score.BLOCK_ELEMENTS", 1)
    assert_scores(nla_score(one.regions, one.nodes, one.segments, CONFIGS["default"]), whole.double(), 1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_two_runs_give_the_same_bits():
    one = instance([3, 1, 6], 33, 5)
    first, second = (nla_score(one.regions, one.nodes, one.segments, CONFIGS["default"]) for _ in range(2))
    assert torch.equal(first, second)
