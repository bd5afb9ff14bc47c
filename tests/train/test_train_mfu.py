"""Model FLOPs utilisation: operations counted as a hand would, peak rates found by the GPU's name."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny

from powerclip.train import mfu
from powerclip.train.mfu import Mfu, operations, peak_flops_of


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A4000", None),  # contains A40 and is none
        ("Tesla T4", None),
    ],
)
def test_a_rate_is_found_by_whole_words_of_the_name(name, tflops):
    assert peak_flops_of(name) == (None if tflops is None else tflops * 1e12)


def hand_count(length: int) -> float:
    """Operations of tiny_run's towers for one pair: two for each multiplication, thrice for forward and backward."""

    def blocks(tokens: int, width: int) -> int:
        linear = 2 * tokens * (3 + 1 + 4 + 4) * width * width
        return linear + 4 * tokens * tokens * width

    pixels = 2 * 4 * (3 * 8 * 8) * 16
    projections = 2 * 5 * 16 * 16 + 2 * length * 8 * 16
    # The images need no gradient of their own.
    return 3 * (blocks(5, 16) + blocks(length, 8) + projections) + 2 * pixels


def test_operations_of_a_pair_are_those_that_a_hand_counts(tmp_path):
    for length in (12, 40):
        found = operations(tiny(tmp_path, "objective=clip"), length)
        assert found == pytest.approx(hand_count(length), rel=0.15)


def test_a_locked_tower_has_no_backward_pass_and_kept_tokens_no_forward_pass(tmp_path):
    deep = ["objective=clip", "model.config.vision_cfg.layers=2", "data.source=corpus", "data.crop=1"]
    data = [f"data.{name}={tmp_path}" for name in ("shards", "trees")]
    whole, locked, kept = (
        operations(tiny(tmp_path, *deep, *data, *frozen), 12)
        for frozen in ([], ["train.freeze='image:2'"], ["train.freeze='image:2'", "train.precompute=true"])
    )
    pixels = 2 * 4 * (3 * 8 * 8) * 16
    blocks = 2 * (2 * 5 * 12 * 16 * 16 + 4 * 5 * 5 * 16)
    assert whole - locked == 2 * blocks + pixels
    assert locked - kept == blocks + pixels


def test_a_masked_method_needs_fewer_operations_even_where_images_decide_how_many(tmp_path):
    larger = [f"model.config.vision_cfg.{name}" for name in ("image_size=64", "width=64", "layers=4")]
    whole, *masked = (
        operations(tiny(tmp_path, f"objective={name}", *larger), 16) for name in ("clip", "flip", "e_clip")
    )
    assert all(0 < cost < whole for cost in masked)


def test_the_share_is_what_is_reached_of_all_gpus_and_left_out_where_no_rate_is_known(tmp_path, monkeypatch):
    recipe = tiny(tmp_path)
    assert Mfu(recipe, torch.device("cpu")).read(1000, 16) == {}
    monkeypatch.setattr(mfu, "peak_flops", lambda device: 1e12)
    found = Mfu(recipe, torch.device("cpu"), gpus=4).read(1000, 16)
    assert found["mfu"] == pytest.approx(1000 * operations(recipe, 16) / 4e12)
