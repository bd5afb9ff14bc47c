import pytest
import torch
from PIL import Image

from powerclip.data.scenes import render, test_scenes
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import build, load, save
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.ground import caption_heatmaps, ground, word_tree

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
    assert ground(image, CAPTION, model, target, BRACKETS) == target
    with Image.open(target) as made:
        made.load()
        # The image, the caption and its four phrases stand side by side.
        assert made.width > 5 * made.height / 2
    assert [path.name for path in target.parent.iterdir()] == ["out.png"]


def test_without_a_tree_each_word_is_looked_for():
    tree = word_tree("A dog, sitting!")
    assert [("A dog, sitting!"[node.start : node.end]) for node in tree.nodes] == [
        "A dog, sitting",
        "A",
        "dog",
        "sitting",
    ]


def test_phrases_beyond_the_context_length_are_left_out():
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    vision = {"image_size": 16, "patch_size": 8, "head_width": 16, **tower}
    text = {"context_length": 6, "vocab_size": 49408, "heads": 2, **tower}
    encoder = build(config={"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}).eval()
    caption = "one two three four five six seven"
    embedder = Embedder(encoder, CaptionTokenizer(context_length=6))
    phrases, heat = caption_heatmaps(embedder, torch.rand(3, 16, 16), caption, word_tree(caption))
    assert phrases == [caption, "one", "two", "three", "four"]
    assert heat.shape == (5, 2, 2)


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
        ground(**arguments)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"plain text", b"\x89PNG\r\n\x1a\n and then nonsense"])
def test_a_file_that_is_no_image_is_named(content, tmp_path):
    path = tmp_path / "fake.jpg"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"fake\.jpg"):
        ground(path, CAPTION, "no-such-model", tmp_path / "out.png")


def test_an_image_that_was_cut_short_is_named(image, tmp_path):
    path = tmp_path / "cut.png"
    path.write_bytes(image.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"cut\.png"):
        ground(path, CAPTION, "no-such-model", tmp_path / "out.png")


def test_an_output_below_a_file_is_refused(image, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file, not a folder"):
        ground(image, CAPTION, "no-such-model", tmp_path / "file" / "out.png")


def test_models_stand_below_each_other_and_captions_follow(model, image, tmp_path, monkeypatch):
    drawn = []
    from powerclip.report import heatmaps as figures

    original = figures.heatmap_figure
    monkeypatch.setattr(figures, "heatmap_figure", lambda rows: drawn.extend(rows) or original(rows))
    torch.manual_seed(1)
    other = save(build(config=load(model)[0].config), tmp_path / "other")
    captions = ["a dog on a red chair", "a dog on a blue chair"]
    ground(image, captions, [model, other], tmp_path / "out.png")
    assert [(row.name, row.continues) for row in drawn] == [("tiny", False), ("other", True)] * 2
    assert [row.panels[0].phrase for row in drawn[::2]] == captions
    first, second = (row.panels[0].values for row in drawn[:2])
    assert not torch.allclose(first, second)


def test_trees_are_one_for_each_caption(image, tmp_path):
    with pytest.raises(UserError, match="2 captions, but 1 trees"):
        ground(image, [CAPTION, CAPTION], "no-such-model", tmp_path / "out.png", [BRACKETS])
