"""The exact kernel against enumeration in float64: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
from kernel_examples import INSTANCES, assert_scores, instance, reference

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.kernels.exact_all import exact_all

pytestmark = pytest.mark.kernels
CONFIGS = {
    "default": AlignmentConfig(aggregation="exact"),
    "any set": AlignmentConfig(aggregation="exact", largest_set=0),
    "paper": AlignmentConfig.named("paper", aggregation="exact"),
    "no R2T": AlignmentConfig(aggregation="exact", r2t=False, largest_set=0),
    "no T2R": AlignmentConfig(aggregation="exact", t2r=False),
    "best region, empty set": AlignmentConfig.named("paper", aggregation="exact", largest_set=1),
}
SLOW = {"ragged, odd", "64 nodes"}  # in the interpreter, which runs a node at a time


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", sorted(set(INSTANCES) - SLOW))
def test_scores_equal_enumeration(name, config):
    one = INSTANCES[name]()
    scores = exact_all(one.regions, one.nodes, one.segments, CONFIGS[config])
    assert_scores(scores, reference(one, CONFIGS[config]))


@pytest.mark.parametrize(("lengths", "images", "regions"), [([1, 64, 2], 5, 3), ([1, 12, 2], 33, 10)])
def test_long_captions_and_more_regions_than_fit_registers_at_once(lengths, images, regions):
    one = instance(lengths, images, regions, width=70)
    assert_scores(
        exact_all(one.regions, one.nodes, one.segments, CONFIGS["default"]), reference(one, CONFIGS["default"])
    )


def test_blocks_of_images_give_the_same_scores(monkeypatch):
    one = instance([2, 1], 131, 5)
    whole = exact_all(one.regions, one.nodes, one.segments, CONFIGS["default"])
    monkeypatch.setattr("powerclip.alignment.kernels.exact_all.BLOCK_ELEMENTS", 130 * len(one.nodes) * 5)
    assert_scores(exact_all(one.regions, one.nodes, one.segments, CONFIGS["default"]), whole.double(), 1e-6)


def test_too_many_regions_are_refused():
    one = instance([2, 1], 2, 17)
    with pytest.raises(ValueError, match=r"at most 16 regions, not of 17.*aggregation: nla"):
        exact_all(one.regions, one.nodes, one.segments, CONFIGS["default"])


def test_two_runs_give_the_same_bits():
    one = INSTANCES["one image"]()
    first, second = (exact_all(one.regions, one.nodes, one.segments, CONFIGS["default"]) for _ in range(2))
    assert torch.equal(first, second)
