"""Blending: weights between those of two models, saved as a model that open_clip reads."""

from __future__ import annotations

import sys

import open_clip
import pytest
import torch

from powerclip import cli
from powerclip.encoders import build, load, save
from powerclip.encoders.blend import blend
from powerclip.errors import UserError

TOWERS = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 64, "width": 8, "heads": 1, "layers": 1},
}


def test_weights_lie_between_those_of_the_two_models(tmp_path, monkeypatch, capsys):
    models = [build(config=TOWERS) for _ in range(2)]
    folders = [save(model, tmp_path / name) for model, name in zip(models, "ab", strict=True)]
    monkeypatch.setattr(
        sys, "argv", ["powerclip", "blend", *map(str, folders), "--share", "0.25", "-o", str(tmp_path / "c")]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert "0.75 of" in capsys.readouterr().out
    a, b = (model.clip.state_dict() for model in models)
    between = load(tmp_path / "c")[0].clip.state_dict()
    for name, value in between.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, 0.75 * a[name] + 0.25 * b[name])
    images = torch.randn(2, 3, 16, 16)
    plain, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'c'}")
    with torch.no_grad():
        torch.testing.assert_close(
            plain.encode_image(images, normalize=True), load(tmp_path / "c")[0].encode_image(images)
        )


def test_a_share_of_0_or_1_is_one_of_the_models():
    models = [build(config=TOWERS) for _ in range(2)]
    weights = [{name: value.clone() for name, value in model.clip.state_dict().items()} for model in models]
    for share, expected in ((0.0, weights[0]), (1.0, weights[1])):
        models[0].clip.load_state_dict(weights[0])
        blended = blend(models[0], models[1], share).clip.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in blended.items())


@pytest.mark.parametrize(
    "change", [{"embed_dim": 8}, {"quick_gelu": True}, {"text_cfg": {**TOWERS["text_cfg"], "layers": 2}}]
)
def test_models_with_other_towers_are_refused(change):
    with pytest.raises(UserError, match="do not have the same towers"):
        blend(build(config=TOWERS), build(config={**TOWERS, **change}), 0.5)


def test_a_share_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"must lie in \[0, 1\], not 1.5"):
        blend(build(config=TOWERS), build(config=TOWERS), 1.5)
