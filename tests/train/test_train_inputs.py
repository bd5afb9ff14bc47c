"""What a recipe reads is found, or missed by the name of its setting, before towers are built."""

from __future__ import annotations

import pytest
from tiny_run import tiny

from powerclip.errors import UserError
from powerclip.train import state
from powerclip.train.inputs import check_inputs, count_samples, inputs
from powerclip.train.loop import train
from powerclip.train.recipe import load_recipe


def test_a_recipe_of_the_paper_without_its_data_fails_in_one_line_that_names_the_key(tmp_path, monkeypatch):
    def build(**_: object) -> None:
        raise AssertionError("towers were built")

    monkeypatch.setattr(state, "build", build)
    monkeypatch.delenv("POWERCLIP_DATA", raising=False)
    with pytest.raises(UserError, match=r"^data\.shards: .*the environment variable POWERCLIP_DATA is not set"):
        train(load_recipe("powerclip_r_b16_cc12m"), tmp_path / "run")
    monkeypatch.setenv("POWERCLIP_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"^data\.shards: nothing matches .*cc12m/\*\.tar"):
        train(load_recipe("cc12m/powerclip_s"), tmp_path / "run")
    with pytest.raises(UserError, match=r"^data\.shards: none of .* is there \(the first would be .*00000\.tar"):
        train(load_recipe("cc12m/clip", ["data.shards='${POWERCLIP_DATA}/{00000..00009}.tar'"]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_scenes_need_nothing(tmp_path):
    assert list(inputs(tiny(tmp_path))) == []
    check_inputs(tiny(tmp_path))


def test_shards_of_which_some_are_gone_are_counted(tmp_path, mini_corpus):
    pattern = f"'{mini_corpus}/train-{{000..003}}.tar'"
    (found,) = inputs(tiny(tmp_path, "data.source=shards", f"data.shards={pattern}"))
    assert found.problem is None
    assert "2 files" in found.summary
    assert "2 more are not there" in found.summary
    assert count_samples(found.paths) == 12
