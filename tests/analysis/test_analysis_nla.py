"""The approximation study: what must hold of it whatever the vectors are."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import Parts
from powerclip.alignment.loss import alignment_loss
from powerclip.analysis.nla import ALPHAS, TAUS, agreement, analyse, lines, pair_losses, random_vectors, study
from powerclip.encoders import build, save


@pytest.fixture(scope="module")
def found():
    return study("random", [random_vectors(batch, 8, 6, seed=0, width=64) for batch in range(2)])


def test_every_point_of_the_grid_is_there(found):
    assert [(point.tau, point.alpha) for point in found.points] == [(tau, alpha) for tau in TAUS for alpha in ALPHAS]
    assert found.pairs == 16


def test_t2r_is_nearly_exact_at_a_small_temperature_and_does_not_know_alpha(found):
    points = [found.at(0.001, alpha) for alpha in ALPHAS]
    assert all(point.t2r == points[0].t2r for point in points)
    assert points[0].t2r.r > 0.9999
    assert found.at(0.1, 0.0).t2r.bias > abs(points[0].t2r.bias)


def test_alpha_moves_r2t_from_below_the_exact_values_to_above(found):
    biases = [found.at(0.001, alpha).r2t.bias for alpha in ALPHAS]
    assert biases == sorted(biases)
    assert biases[0] < 0 < biases[-1]


def test_the_mean_of_the_pair_losses_is_the_loss_that_trains():
    vectors = random_vectors(0, 8, 6, seed=3, width=64)
    config = AlignmentConfig.named("paper", aggregation="exact", gamma=0.2)
    parts = Parts(vectors.regions.float(), vectors.nodes.float(), vectors.segments)
    assert study("one", [vectors]).exact.mean().item() == pytest.approx(
        alignment_loss(parts, config).loss.item(), rel=1e-4
    )


def test_pair_losses_by_hand():
    # Of pair 0: 0.5 − 1 + 0.2 < 0 in its row, 0.9 − 1 + 0.2 in its column; of pair 1: 0.9 − 0.4 + 0.2, 0.5 − 0.4 + 0.2.
    assert pair_losses(torch.tensor([[1.0, 0.5], [0.9, 0.4]])).tolist() == pytest.approx([0.1, 1.0])


def test_agreement_of_shifted_values_has_their_order_and_a_bias():
    exact = torch.tensor([1.0, 2.0, 3.0])
    found = agreement(exact + 2, exact)
    assert found.r == pytest.approx(1)
    assert found.bias == pytest.approx(2)
    assert agreement(torch.ones(3), exact).r is None


def test_a_models_own_embeddings_are_studied_beside_random_ones(tmp_path):
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "head_width": 16, **tower},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "heads": 2, **tower},
    }
    model = str(save(build(config=config), tmp_path / "tiny"))
    both = analyse(tmp_path / "out", model, batches=1, count=4, regions=4)
    assert [one.source for one in both] == ["random vectors", model]
    assert both[1].at(0.001, 0.5).t2r.r > 0.999
    written = json.loads((tmp_path / "out" / "nla.json").read_text())
    assert [len(one["points"]) for one in written["studies"]] == [15, 15]
    with Image.open(tmp_path / "out" / "nla.png") as picture:
        assert picture.height > picture.width  # two sources, one above the other
    assert len(lines(both[0])) == 17
