"""Images show what the scene says: boxes, colours and shapes as drawn."""

from dataclasses import replace

import pytest
import torch

from powerclip.data.scenes import generate, render, scene_batch
from powerclip.data.scenes.layout import SceneObject
from powerclip.data.scenes.vocabulary import COLOURS, PATTERNS, SHAPES, SIZES
from powerclip.errors import UserError

GREY = (0.5, 0.5, 0.5)


def alone(thing: SceneObject):
    """A scene of this one object on an even grey."""
    scene = generate(0, 0)
    background = scene.background._replace(kind="plain", near=GREY, far=GREY, light=1.0)
    return replace(scene, objects=(thing,), background=background)


def drawn_mask(thing: SceneObject, size: int) -> torch.Tensor:
    image = render([alone(thing)], size)[0].float()
    return (image - 127.5).abs().amax(0) > 12


def test_images_are_bytes_of_the_size_asked_for():
    scenes = scene_batch(range(5), seed=0)
    assert render(scenes, 64).shape == (5, 3, 64, 64)
    assert render(scenes, 48).shape == (5, 3, 48, 48)
    assert render(scenes, 64).dtype == torch.uint8
    assert render([], 64).shape == (0, 3, 64, 64)


def test_an_image_does_not_depend_on_its_batch():
    scenes = scene_batch(range(12), seed=0)
    together = render(scenes, 64)
    for k, scene in enumerate(scenes):
        assert (together[k].int() - render([scene], 64)[0].int()).abs().max() <= 1


def test_an_image_too_small_to_draw_is_a_clear_error():
    with pytest.raises(UserError, match="8 pixels"):
        render(scene_batch(range(1), seed=0), 8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [64, 112])
def test_the_gold_box_is_the_box_of_the_drawn_pixels(shape, size):
    for k, name in enumerate(SIZES):
        thing = SceneObject(shape, "blue", name, "plain", 0.31 + 0.17 * k, 0.58 - 0.11 * k, SIZES[name][1])
        rows, columns = drawn_mask(thing, size).nonzero(as_tuple=True)
        drawn = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        # A thin tip covers less than half a pixel before it ends: two pixels of grace.
        assert all(abs(side - gold * size) <= 2 for side, gold in zip(drawn, thing.box, strict=True))


def test_objects_change_pixels_only_inside_their_boxes():
    for scene in scene_batch(range(60), seed=5):
        empty = replace(scene, objects=())
        image, behind = render([scene], 64)[0].int(), render([empty], 64)[0].int()
        changed = ((image - behind).abs().amax(0) > 12).nonzero()
        for row, column in changed.tolist():
            x, y = (column + 0.5) / 64, (row + 0.5) / 64
            assert any(
                x0 - 0.025 <= x <= x1 + 0.025 and y0 - 0.025 <= y <= y1 + 0.025
                for x0, y0, x1, y1 in (thing.box for thing in scene.objects)
            )


def test_every_object_stands_out_from_its_background():
    for scene in scene_batch(range(200), seed=6):
        empty = replace(scene, objects=())
        difference = (render([scene], 64)[0].int() - render([empty], 64)[0].int()).abs().amax(0)
        for thing in scene.objects:
            x0, y0, x1, y1 = (round(side * 64) for side in thing.box)
            inside = difference[y0:y1, x0:x1]
            assert (inside > 40).float().mean() > 0.2, (scene.key, thing)


def test_silhouettes_differ():
    masks = {shape: drawn_mask(SceneObject(shape, "blue", "large", "plain", 0.5, 0.5, 0.22), 64) for shape in SHAPES}
    for one, a in masks.items():
        for other, b in masks.items():
            if one < other:
                assert (a & b).sum() / (a | b).sum() < 0.85, (one, other)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_colour_of_an_object_is_the_nearest_of_the_vocabulary(colour, pattern):
    thing = SceneObject("square", colour, "large", pattern, 0.5, 0.5, 0.22)
    inside = render([alone(thing)], 64)[0, :, 20:44, 20:44].float().flatten(1) / 255  # clear of the rim
    names, values = list(COLOURS), torch.tensor(list(COLOURS.values()))
    # Compared by hue and whiteness rather than by brightness, which shading and patterns change.
    direction = torch.nn.functional.normalize(values - 0.6 * values.amin(1, keepdim=True), dim=1)
    mean = inside.mean(1)
    mean = torch.nn.functional.normalize(mean - 0.6 * mean.min(), dim=0)
    assert names[int((direction @ mean).argmax())] == colour


def test_patterns_are_visible_on_the_smallest_objects():
    for shape in SHAPES:
        images = []
        for pattern in PATTERNS:
            thing = SceneObject(shape, "orange", "small", pattern, 0.5, 0.5, SIZES["small"][0])
            images.append(render([alone(thing)], 64)[0].int())
        for k, one in enumerate(images):
            for other in images[:k]:
                assert ((one - other).abs().amax(0) > 30).sum() >= 5, shape
