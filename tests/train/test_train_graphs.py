"""On a GPU, towers that are replayed as CUDA graphs train the same model as towers whose kernels are launched."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny, weights

from powerclip.train.loop import train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("objective", ["clip", "powerclip", "a_clip"])
def test_graphs_train_the_same_model(tmp_path, objective):
    settings = ["train.device=cuda", f"objective={objective}", "train.steps=12", "train.batch_size=16"]
    settings += ["objective_settings.hidden=16", "objective_settings.cell=1"] if objective == "a_clip" else []
    for way in ("always", "auto"):
        train(tiny(tmp_path, *settings, f"train.compile={way}"), tmp_path / way, quiet=True)
    launched, replayed = weights(tmp_path / "always"), weights(tmp_path / "auto")
    for name, value in launched.items():
        torch.testing.assert_close(replayed[name], value, msg=name)


def test_a_second_run_of_a_process_has_its_own_graphs(tmp_path):
    settings = ["train.device=cuda", "train.steps=8", "train.batch_size=16"]
    for name, seed in (("first", 0), ("other", 1), ("again", 0)):
        train(tiny(tmp_path, *settings, f"train.seed={seed}"), tmp_path / name, quiet=True)
    first, other, again = (weights(tmp_path / name) for name in ("first", "other", "again"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
