"""The small model that comes with the package: it loads by its name, everywhere, and its phrases point."""

from __future__ import annotations

import sys

import open_clip
import pytest
import torch
from torchvision.transforms.functional import to_pil_image

import powerclip
from powerclip.cli import main
from powerclip.data import scenes
from powerclip.data.tokens import CaptionTokenizer
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.scenes import scene_tasks
from powerclip.runtime.shipped import MODEL, MODEL_FOLDER


@pytest.fixture(scope="module")
def loaded():
    return powerclip.load(MODEL)


def test_it_is_small_has_a_card_and_open_clip_gives_the_same_embeddings(loaded):
    encoder, preprocess, tokenizer = loaded
    files = {path.name: path.stat().st_size for path in MODEL_FOLDER.iterdir()}
    assert sum(files.values()) < 10_100_000
    card = (MODEL_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in card
    assert "objective: powerclip" in card
    assert "To fill in" not in card
    plain, _ = open_clip.create_model_from_pretrained(f"local-dir:{MODEL_FOLDER}")
    image = preprocess(to_pil_image(scenes.render(scenes.test_scenes(1, seed=0), size=64)[0]))[None]
    tokens = tokenizer(["a red circle"])
    with torch.no_grad():
        assert torch.equal(encoder.encode_image(image), plain.encode_image(image, normalize=True))
        assert torch.equal(encoder.encode_text(tokens), plain.encode_text(tokens, normalize=True))


def test_its_phrases_point_at_what_they_name(loaded):
    encoder, _, tokenizer = loaded
    tasks = scene_tasks(400, encoder.image_size[0], seed=1)  # not the scenes that its card's scores are of
    scores = tasks["pointing"].score(Embedder(encoder, CaptionTokenizer(tokenizer))).flat()
    assert scores["pointing_words"] > 0.5 > 0.2 > scores["pointing_chance"]


def test_ground_takes_it_when_no_model_is_named(tmp_path, monkeypatch, capsys):
    scene = scenes.test_scenes(1, seed=0)[0]
    to_pil_image(scenes.render([scene], size=64)[0]).save(tmp_path / "scene.png")
    output = tmp_path / "maps.png"
    monkeypatch.setattr(
        sys, "argv", ["powerclip", "ground", str(tmp_path / "scene.png"), scene.caption, "-o", str(output)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (None, 0)
    assert output.stat().st_size > 0
    assert str(output) in capsys.readouterr().out
