"""The figure of `powerclip ground`."""

import logging

import pytest
import torch
from PIL import Image

from powerclip.data.scenes import render, test_scenes
from powerclip.encoders import build, load, save
from powerclip.errors import UserError
from powerclip.evaluate.ground_figure import draw_grounding

CAPTION = "a dog sitting on a red chair"
BRACKETS = "(NP (NP a dog) (VP sitting (PP on (NP a red chair))))"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "head_width": 16, **tower},
        "text_cfg": {"context_length": 32, "vocab_size": 49408, "heads": 2, **tower},
    }
    return save(build(config=config), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "scene.png"
    Image.fromarray(render(test_scenes(1, 0), 48)[0].permute(1, 2, 0).numpy()).save(path)
    return path


def test_a_caption_with_its_tree_becomes_one_image_in_a_new_folder(model, image, tmp_path):
    target = tmp_path / "deep" / "down" / "out.png"
    assert draw_grounding(image, CAPTION, model, target, BRACKETS) == target
    with Image.open(target) as made:
        made.load()
        # The image, the caption and its four phrases stand side by side.
        assert made.width > 5 * made.height / 2
    assert [path.name for path in target.parent.iterdir()] == ["out.png"]


def test_without_a_tree_the_caption_is_parsed(model, image, tmp_path, monkeypatch):
    drawn = []
    from powerclip.report import heatmaps as figures

    original = figures.heatmap_figure
    monkeypatch.setattr(figures, "heatmap_figure", lambda rows: drawn.extend(rows) or original(rows))
    draw_grounding(image, CAPTION, model, tmp_path / "out.png")
    phrases = [panel.phrase for panel in drawn[0].panels]
    assert phrases[0] == CAPTION
    assert {"a dog", "a red chair"} <= set(phrases)


def test_relative_heatmaps_are_drawn_when_asked(model, image, tmp_path, monkeypatch):
    drawn = []
    from powerclip.report import heatmaps as figures

    original = figures.heatmap_figure
    monkeypatch.setattr(figures, "heatmap_figure", lambda rows: drawn.extend(rows) or original(rows))
    for relative in (False, True):
        draw_grounding(image, CAPTION, model, tmp_path / "out.png", BRACKETS, relative=relative)
    plain, less = ([panel.values for panel in row.panels] for row in drawn)
    assert torch.equal(less[0], plain[0])  # the whole caption
    torch.testing.assert_close(less[1], (plain[1] - plain[4]) / 2)  # a dog, less the mean of a dog and a red chair


def test_a_caption_that_is_cut_is_said_with_what_was_not_read(model, image, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        draw_grounding(image, "a dog and " * 12 + "a final cat", model, tmp_path / "out.png")
    (message,) = [record.getMessage() for record in caplog.records]
    assert "reads 32 tokens" in message
    assert message.endswith("a final cat'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_path": "missing.png"}, "no image at missing.png"),
        ({"image_path": "."}, "is a folder"),
        ({"caption": " … "}, "no word"),
        ({"brackets": "(NP a dog"}, "does not bracket"),
        ({"brackets": "(NP a cat)"}, "does not match"),
        ({"output": "."}, "is a folder"),
        ({"output": "out.jpg"}, "end in .png"),
    ],
)
def test_bad_input_is_one_clear_line_before_any_model_is_loaded(change, message, image, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"image_path": image, "caption": CAPTION, "model": "no-such-model", "output": "out.png", **change}
    with pytest.raises(UserError, match=message) as caught:
        draw_grounding(**arguments)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"plain text", b"\x89PNG\r\n\x1a\n and then nonsense"])
def test_a_file_that_is_no_image_is_named(content, tmp_path):
    path = tmp_path / "fake.jpg"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"fake\.jpg"):
        draw_grounding(path, CAPTION, "no-such-model", tmp_path / "out.png")


def test_an_image_that_was_cut_short_is_named(image, tmp_path):
    path = tmp_path / "cut.png"
    path.write_bytes(image.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"cut\.png"):
        draw_grounding(path, CAPTION, "no-such-model", tmp_path / "out.png")


def test_an_output_below_a_file_is_refused(image, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file, not a folder"):
        draw_grounding(image, CAPTION, "no-such-model", tmp_path / "file" / "out.png")


def test_models_stand_below_each_other_and_captions_follow(model, image, tmp_path, monkeypatch):
    drawn = []
    from powerclip.report import heatmaps as figures

    original = figures.heatmap_figure
    monkeypatch.setattr(figures, "heatmap_figure", lambda rows: drawn.extend(rows) or original(rows))
    torch.manual_seed(1)
    other = save(build(config=load(model)[0].config), tmp_path / "other")
    captions = ["a dog on a red chair", "a dog on a blue chair"]
    draw_grounding(image, captions, [model, other], tmp_path / "out.png")
    assert [(row.name, row.continues) for row in drawn] == [("tiny", False), ("other", True)] * 2
    assert [row.panels[0].phrase for row in drawn[::2]] == captions
    first, second = (row.panels[0].values for row in drawn[:2])
    assert not torch.allclose(first, second)


def test_trees_are_one_for_each_caption(image, tmp_path):
    with pytest.raises(UserError, match="2 captions, but 1 trees"):
        draw_grounding(image, [CAPTION, CAPTION], "no-such-model", tmp_path / "out.png", [BRACKETS])
