"""A detector learns on scenes, goes on where it was killed bit for bit, and names by text embeddings alone."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_detection import FEW, few_scenes, save_tower, tiny_recipe, tiny_tower
from torchvision.models.detection.image_list import ImageList
from typer.testing import CliRunner

from powerclip import cli
from powerclip.detect.detector import Detector, HeadConfig, tower_maps
from powerclip.detect.loader import BoxLoader
from powerclip.detect.pyramid import SimplePyramid, strides_of
from powerclip.detect.recipe import DetectFolder, DetectRecipe
from powerclip.detect.saved import load_detector
from powerclip.detect.scene_boxes import scene_boxes
from powerclip.detect.show import Shown, find_named
from powerclip.detect.train import Training, describe_run, train_detector
from powerclip.encoders import load
from powerclip.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tower(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> DetectFolder:
    """A short run with a calibration."""
    folder = tmp_path_factory.mktemp("run") / "run"
    return train_detector(tiny_recipe(model, exponents=[], scenes=120), folder, device="cpu", quiet=True)


def test_after_training_unseen_scenes_have_lower_losses_and_gold_boxes_better_names(tmp_path):
    tower = tiny_tower()
    data, unseen = few_scenes(400), few_scenes(200, seed=1)
    # A text tower that has learned nothing gives all classes one direction.
    texts = torch.nn.functional.normalize(torch.randn(len(FEW), 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    recipe = tiny_recipe(tmp_path, steps=150, batch_size=4, lr=5e-3, warmup=5, seed=1)
    training = Training(recipe, DetectFolder(tmp_path / "run"), data, texts, tower, quiet=True)
    batch = BoxLoader(unseen, 64, 24, seed=0).batch(0)
    before = {name: value.clone() for name, value in tower.clip.visual.state_dict().items()}

    def look() -> tuple[dict[str, float], float]:
        torch.manual_seed(0)
        training.detector.train()
        with torch.no_grad():
            losses = training.detector.losses(batch.images, batch.boxes, batch.labels, texts)
            learned, _ = training.detector.eval().name_boxes(batch.images, batch.boxes, texts)
        right = (learned.argmax(-1) == torch.cat(batch.labels)).float().mean().item()
        return {name: value.item() for name, value in losses.items()}, right

    start, named_at_start = look()
    training.detector.train()
    training.run()
    end, named = look()
    assert sum(end.values()) < 0.6 * sum(start.values())
    assert end["objectness"] < start["objectness"]
    assert named > max(0.4, named_at_start)
    for name, value in tower.clip.visual.state_dict().items():
        assert torch.equal(value, before[name]), name  # frozen


def same(one: DetectFolder, other: DetectFolder) -> bool:
    a, b = load_file(one.weights), load_file(other.weights)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_that_was_killed_ends_as_one_that_never_stopped(model, tmp_path, monkeypatch):
    recipe = tiny_recipe(model, steps=5, tune=1e-3)
    whole = train_detector(recipe, tmp_path / "whole", device="cpu", quiet=True)
    step = Training.train_step

    def killed(self, *arguments):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "train_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train_detector(recipe, tmp_path / "cut", device="cpu", quiet=True, checkpoint_every=2)
    cut = DetectFolder(tmp_path / "cut")
    assert not cut.finished
    with pytest.raises(UserError, match="holds an unfinished run"):
        train_detector(recipe, cut.root, device="cpu", quiet=True)
    with pytest.raises(UserError, match="with other settings"):
        train_detector(tiny_recipe(model, steps=7, tune=1e-3), cut.root, resume=True, device="cpu", quiet=True)
    train_detector(recipe, cut.root, resume=True, device="cpu", quiet=True)
    assert same(whole, cut)
    tuned = [load(folder.model)[0].state_dict() for folder in (whole, cut)]
    assert all(torch.equal(value, tuned[1][name]) for name, value in tuned[0].items())
    begun = load(model)[0].state_dict()
    assert not torch.equal(tuned[0]["clip.visual.conv1.weight"], begun["clip.visual.conv1.weight"])
    assert torch.equal(tuned[0]["clip.token_embedding.weight"], begun["clip.token_embedding.weight"])
    steps = [json.loads(line)["step"] for line in cut.metrics.read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_a_run_is_complete_by_itself_and_says_how_it_chose(run):
    assert run.finished
    assert not run.checkpoints.exists()
    trained = load_detector(run.root)
    chosen = json.loads(run.calibration.exponents.read_text())
    assert chosen["exponents"] == {"base": trained.exponents.base, "novel": trained.exponents.novel}
    assert len(chosen["base"]) == len(chosen["grid"]) == 11
    assert set(chosen["held_out"]) < set(trained.learned)
    assert load(str(run.root))[0].embed_dim == 32
    assert run.read().scenes == 120
    assert train_detector(run.read(), run.root, resume=True, device="cpu", quiet=True).finished


def test_text_embeddings_are_all_that_names_a_class(run):
    trained = load_detector(run.root)
    detector = trained.detector
    image = scene_boxes(1, part="val").read(0, 64)
    names = ["a red umbrella", "orange circle", "pink star"]
    texts = trained.embed(trained.classes(names))
    found, turned = (detector.find([image], one)[0] for one in (texts, texts[[2, 0, 1]]))
    assert torch.equal(found.boxes, turned.boxes)
    assert torch.allclose(found.learned[:, [2, 0, 1]], turned.learned, atol=1e-6)
    assert torch.allclose(found.tower[:, [2, 0, 1]], turned.tower, atol=1e-6)
    assert trained.classes(names).novel == (True, False, False)
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    boxes = find_named(trained, picture, ["a red  umbrella"], Shown(least=0.0, most=5))
    assert {one.name for one in boxes} <= {"a red umbrella"}
    shown = find_named(trained, picture, [], Shown(least=0.0))
    assert 0 < len(shown) <= 20
    assert {one.name for one in shown} <= set(trained.learned)
    with pytest.raises(UserError, match="a phrase is empty"):
        find_named(trained, picture, [" "])


def test_what_an_image_becomes_does_not_depend_on_the_others_of_its_batch():
    tower = tiny_tower()
    sizes = [(64, 40), (41, 64), (64, 40)]
    images = torch.zeros(3, 3, 64, 64)
    for k, (height, width) in enumerate(sizes):
        images[k, :, :height, :width] = torch.randn(3, height, width)
    with torch.no_grad():
        patches, dense = tower_maps(tower, ImageList(images, sizes), 8)
        _, alone, projected = tower.encode_maps(images[1:2, :, :48])
    assert patches.shape == (3, 48, 8, 8)
    assert torch.allclose(patches[1, :, :6], alone[0], atol=1e-5)
    assert torch.allclose(dense[1, :, :6], projected[0], atol=1e-5)
    assert not patches[1, :, 6:].any()
    assert not dense[0, :, :, 5:].any()


@pytest.mark.parametrize(
    ("patch", "strides"), [(8, (4, 8, 16, 32)), (14, (7, 14, 28, 56)), (16, (4, 8, 16, 32)), (32, (8, 16, 32, 64))]
)
def test_a_pyramid_has_a_map_at_each_stride(patch, strides):
    assert strides_of(patch) == strides
    maps = SimplePyramid(6, 4, patch)(torch.randn(2, 6, 2 * strides[-1] // patch, 4 * strides[-1] // patch))
    assert [tuple(one.shape[2:]) for one in maps.values()] == [
        (2 * strides[-1] // s, 4 * strides[-1] // s) for s in strides
    ]
    assert all(one.shape[1] == 4 for one in maps.values())


def test_batches_are_a_function_of_their_number_and_mirror_boxes_with_their_image():
    data = few_scenes(40)
    loader = BoxLoader(data, 32, 4, seed=0)
    streamed = list(loader.stream(3, 6))
    for step, batch in zip(range(3, 6), streamed, strict=True):
        again = BoxLoader(data, 32, 4, seed=0).batch(step)
        assert all(torch.equal(a, b) for a, b in zip(batch.images, again.images, strict=True))
    mirrored = 0
    for (_, number), image, boxes in zip(loader.numbers(3), streamed[0].images, streamed[0].boxes, strict=True):
        plain = torch.equal(image, data.read(number, 32))
        assert plain or torch.equal(image.flip(-1), data.read(number, 32))
        gold = data.images[number].boxes * 32
        expected = gold if plain else torch.stack([32 - gold[:, 2], gold[:, 1], 32 - gold[:, 0], gold[:, 3]], 1)
        assert torch.allclose(boxes, expected, atol=1e-4)
        mirrored += not plain
    epochs = [[number for _, number in loader.numbers(step)] for step in range(len(data) // 4)]
    assert len({number for batch in epochs for number in batch}) == 4 * (len(data) // 4)


def test_settings_that_cannot_be_are_one_clear_line(model, tmp_path):
    for changes, message in (
        ({"exponents": [0.5]}, "two shares"),
        ({"exponents": [0.5, 1.5]}, "two shares"),
        ({"warmup": 100}, "longer than the run"),
        ({"steps": 0}, "steps must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            tiny_recipe(model, **changes)
    assert DetectRecipe("x").exponents == []
    with pytest.raises(UserError, match="no detector here"):
        load_detector(model)
    with pytest.raises(UserError, match="scenes are drawn"):
        train_detector(tiny_recipe(model, images=["x"]), tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()
    config = HeadConfig(64, 16, 32)
    assert Detector(tiny_tower(), config).multiple == 32


def call(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_find_name_and_draw_boxes(run, model, tmp_path):
    printed = call("detect", "evaluate", "-m", run.root, "--data", "scenes", "--scenes", 8, "--device", "cpu")
    assert "AP50 base" in printed
    assert "CLIP†" not in printed  # the paper's rows stand beside OV-COCO's classes only
    record = json.loads((run.root / "evaluation" / "scenes.json").read_text())
    assert set(record["metrics"]) == {"ap50_base", "ap50_novel", "ap50"}
    assert json.loads((run.root / "evaluation" / "detections.json").read_text())
    options = ("--data", "scenes", "--scenes", 8, "--gold-boxes", "--device", "cpu")
    with_detector = call("detect", "evaluate", "-m", run.root, *options)
    alone = call("detect", "evaluate", "-m", model, *options, "-o", tmp_path / "gold")
    for view in ("region", "crop", "image", "most frequent class", "chance"):
        assert f"\n{view} " in alone
        assert f"\n{view} " in with_detector
    assert "\nlearned " in with_detector
    image = tmp_path / "scene.png"
    Image.fromarray(scene_boxes(1).read(0, 64).permute(1, 2, 0).numpy()).save(image)
    output = tmp_path / "boxes.png"
    shown = call("detect", "show", image, "a red circle", "-m", run.root, "-o", output, "--score", 0, "--device", "cpu")
    assert f"boxes: {output}" in shown
    with Image.open(output) as drawn:
        assert drawn.width > 500
    lines = describe_run(run.read(), tmp_path / "new")
    assert any("of 67 base classes" in line or "of 68 base classes" in line for line in lines)
    for arguments, message in (
        (("evaluate", "-m", str(model), "--data", "scenes"), "is no detector"),
        (("show", str(image), "x", "-m", str(run.root), "-o", str(tmp_path / "x.jpg")), "as PNG"),
        (("train", "-m", str(model), "--data", "scenes", "--exponents", "a"), "two shares"),
    ):
        with pytest.raises(UserError, match=message):
            CliRunner().invoke(cli.app, ["detect", *arguments], catch_exceptions=False)
