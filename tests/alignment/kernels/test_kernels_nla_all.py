"""The NLA scores with a gradient, in Triton, against autograd through the plain formulas in float64."""

import pytest
import torch
from kernel_examples import CONFIGS, DEVICE, INSTANCES, TIED, assert_scores, gradients, instance, reference

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.kernels import nla_all as module
from powerclip.alignment.kernels.nla_all import nla_all, nla_forward_blocked
from powerclip.alignment.recompute import whole_tiles
from powerclip.alignment.score import differentiates_all, score_all

pytestmark = pytest.mark.kernels
SLOW = set() if torch.cuda.is_available() else {"64 nodes", "ragged, odd"}
# The interpreter runs a node at a time: every setting on a few instances, every instance in two settings.
CASES = [(name, config) for name in ("one node each", "one image", "barely negative") for config in CONFIGS]
CASES += [(name, config) for name in sorted(set(INSTANCES) - SLOW) for config in ("default", "paper")]


def plain(one, config):
    return gradients(score_all, one, AlignmentConfig(**{**vars(config), "backend": "reference"}), torch.float64)


@pytest.mark.parametrize(("name", "config"), sorted(set(CASES)))
def test_values_and_gradients_equal_plain_autograd(name, config):
    one, settings = INSTANCES[name](), CONFIGS[config]
    if name in TIED and settings.t2r and settings.largest_set:
        one.regions = one.regions[:, :1]
    # Float32 rounds Σ q/τ, thousands at τ = 0.001, and a softmax over nodes turns on the absolute error of that.
    tolerances = (1e-5, 5e-3, 5e-3)
    for ours, expected, tolerance in zip(
        gradients(nla_all, one, settings, torch.float32), plain(one, settings), tolerances, strict=True
    ):
        assert_scores(ours, expected, tolerance)


@pytest.mark.parametrize("config", ["default", "paper"])
def test_each_patch_of_a_grid_may_be_a_region(config):
    one, settings = instance([2, 1], 3, 64), CONFIGS[config]
    ours, expected = gradients(nla_all, one, settings, torch.float32), plain(one, settings)
    for found, exact, tolerance in zip(ours, expected, (1e-5, 5e-3, 5e-3), strict=True):
        assert_scores(found, exact, tolerance)


@pytest.mark.parametrize("config", ["soft", "soft, empty set, sums", "very soft"])
def test_gradients_are_accurate_where_the_formulas_are_smooth(config):
    one = INSTANCES["ragged, few"]()
    expected = plain(one, CONFIGS[config])
    for ours, exact in zip(gradients(nla_all, one, CONFIGS[config], torch.float32), expected, strict=True):
        assert_scores(ours, exact, 1e-5)


def test_tiny_gradients_do_not_vanish():
    one = INSTANCES["one image"]()
    _, *whole = gradients(nla_all, one, CONFIGS["soft"], torch.float32)
    _, *small = gradients(lambda *a: 1e-20 * nla_all(*a), one, CONFIGS["soft"], torch.float32)
    for gradient, expected in zip(small, whole, strict=True):
        torch.testing.assert_close(1e20 * gradient, expected, rtol=1e-4, atol=1e-6)


def test_no_gradient_of_the_scores_gives_none():
    one = INSTANCES["one region"]()
    _, *found = gradients(lambda *a: 0 * nla_all(*a), one, CONFIGS["default"], torch.float32)
    assert all((gradient == 0).all() for gradient in found)


def test_tied_regions_share_the_gradient_of_the_best_one():
    one = instance([2], 3, 4)
    one.regions = one.regions[:, :1].expand(-1, 4, -1)
    _, of_regions, _ = gradients(nla_all, one, AlignmentConfig(r2t=False), torch.float32)
    torch.testing.assert_close(of_regions, of_regions[:, :1].expand(-1, 4, -1))


def test_blocks_of_images_give_the_same(monkeypatch):
    one = instance([2, 1], 131, 5)
    scores, *whole = gradients(nla_all, one, CONFIGS["soft"], torch.float32)
    monkeypatch.setattr(module, "FORWARD_ELEMENTS", 1)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1)
    alone = nla_forward_blocked(one.regions, one.nodes, one.segments, CONFIGS["soft"])
    again = gradients(nla_all, one, CONFIGS["soft"], torch.float32)
    for ours, expected in zip([alone, *again], [scores, scores, *whole], strict=True):
        assert_scores(ours, expected.double(), 1e-6)


def test_where_a_tile_of_images_does_not_fit_the_blocks_are_smaller_tiles(monkeypatch):
    one = instance([2, 1], 75, 3)
    expected = nla_forward_blocked(one.regions, one.nodes, one.segments, CONFIGS["soft"])
    sizes = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sizes.append(right.shape[1] // 3)
        return left.float() @ right.float()

    monkeypatch.setattr(module, "KEPT_ELEMENTS", 1)
    monkeypatch.setattr(module, "FORWARD_ELEMENTS", 1)
    monkeypatch.setattr(module, "product", product)
    blocked = nla_forward_blocked(one.regions, one.nodes, one.segments, CONFIGS["soft"])
    assert sizes == [32, 32, 11]
    assert_scores(blocked, expected.double(), 1e-5)


def test_similarities_that_are_computed_again_give_the_same(monkeypatch):
    one = instance([2, 1], 131, 5)
    kept = gradients(nla_all, one, CONFIGS["soft"], torch.float32)
    monkeypatch.setattr(module, "KEPT_ELEMENTS", 1)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 130 * len(one.nodes) * 5)
    again = gradients(nla_all, one, CONFIGS["soft"], torch.float32)
    for ours, expected in zip(again, kept, strict=True):
        assert_scores(ours, expected.double(), 1e-5)


@pytest.mark.parametrize(("tile", "most", "expected"), [(128, 327, 256), (128, 512, 512), (16, 15, 16), (16, 0, 16)])
def test_blocks_are_whole_tiles_of_images(tile, most, expected):
    assert whole_tiles(most, tile) == expected


def test_without_a_gradient_no_similarities_are_kept(monkeypatch):
    one, config = INSTANCES["one image"](), AlignmentConfig(backend="triton", tau=0.1)
    monkeypatch.setattr(module, "nla_all", None)
    assert_scores(score_all(one.regions, one.nodes, one.segments, config), reference(one, config))


def test_bf16_inputs_lose_nothing_but_their_own_rounding():
    one = instance([3, 1, 6], 9, 5, width=64)
    one.regions, one.nodes = one.regions.bfloat16(), one.nodes.bfloat16()
    scores = nla_forward_blocked(one.regions, one.nodes, one.segments, CONFIGS["default"])
    assert_scores(scores, reference(one, CONFIGS["default"]))


@pytest.mark.parametrize("count", [16, 19, 36])
def test_any_number_of_regions_is_scored(count):
    one = instance([2, 3], 3, count)
    for config in (CONFIGS["default"], CONFIGS["soft, empty set, sums"]):
        scores = nla_forward_blocked(one.regions, one.nodes, one.segments, config)
        assert_scores(scores, reference(one, config))


@pytest.mark.parametrize(
    ("captions", "k", "expected"),
    [(4096, 1, False), (4096, 8, False), (4096, 32, True), (512, 1, True), (65536, 99, False)],
)
def test_all_pairs_are_differentiated_where_that_costs_less_and_they_fit(captions, k, expected):
    regions = torch.empty(1, device=DEVICE).expand(512, 10, 512)
    nodes = torch.empty(1, device=DEVICE).expand(8 * captions, 512)
    assert differentiates_all(regions, nodes, AlignmentConfig(backend="triton"), k) == expected


def test_two_runs_give_the_same_bits():
    one = INSTANCES["one image"]()
    runs = [gradients(nla_all, one, CONFIGS["default"], torch.float32) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
