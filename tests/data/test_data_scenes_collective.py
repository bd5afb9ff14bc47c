"""Phrases for several objects: gold sets are what the words say; and drawing does not depend on how it is done."""

from __future__ import annotations

import pytest
import torch

from powerclip.data.scenes import SPLITS, generate, pack_scenes, render, render_packed, scene_batch
from powerclip.data.scenes.layout import may_hold
from powerclip.data.scenes.shapes import SILHOUETTES
from powerclip.data.scenes.vocabulary import HELD_OUT
from powerclip.data.trees import parse_bracketed

NUMBERS = {"both": 2, "two": 2, "three": 3}


@pytest.fixture(scope="module")
def scenes():
    return scene_batch(range(300), 0, "collective")


def named(scene, boxes):
    return [thing for thing in scene.objects if thing.box in boxes]


def test_every_caption_has_a_phrase_for_several_objects_and_its_tree_holds_all_phrases(scenes):
    for scene in scenes:
        assert any(len(boxes) > 1 for _, boxes in scene.phrase_sets)
        spans = {(node.start, node.end) for node in scene.tree.nodes}
        for span, boxes in scene.phrase_sets:
            assert len(set(boxes)) == len(boxes)
            assert (span.start, span.end) in spans or len(scene.phrase_sets) == 1


def test_counted_phrases_name_all_objects_of_that_look_and_no_other(scenes):
    seen = set()
    for scene in scenes:
        for span, boxes in scene.phrase_sets:
            words = scene.caption[span.start : span.end].lower().split()
            if words[0] not in ("both", "the"):
                continue
            number = next(NUMBERS[word] for word in words if word in NUMBERS)
            shape = words[-1].removesuffix("s") if words[-1] != "crosses" else "cross"
            alike = [thing for thing in scene.objects if thing.shape == shape]
            colours = {thing.colour for thing in alike} & set(words)
            alike = [thing for thing in alike if not colours or thing.colour in colours]
            assert len(boxes) == number
            assert named(scene, boxes) == alike
            seen.add((number, bool(colours)))
    assert seen == {(2, False), (2, True), (3, False), (3, True)}


def test_everything_on_a_side_is_what_plainly_lies_there(scenes):
    sides = set()
    for scene in scenes:
        for span, boxes in scene.phrase_sets:
            words = scene.caption[span.start : span.end].lower().split()
            if words[0] != "everything":
                continue
            [target] = [thing for thing in scene.objects if [thing.colour, thing.shape] == words[-2:]]
            for thing in scene.objects:
                if thing is not target:
                    assert may_hold(words[1], thing, target) == (thing.box in boxes)
            sides.add(words[1])
    assert sides == {"left", "right", "above", "below"}


def test_combinations_that_are_kept_out_of_training_do_not_occur(scenes):
    assert not {(thing.colour, thing.shape) for scene in scenes for thing in scene.objects} & set(HELD_OUT)


def test_the_scenes_of_the_other_splits_are_those_of_before():
    assert generate(0, 1).caption == "this picture shows a blue cross above a small purple star"
    assert generate(0, 5, "collective").caption != generate(0, 5, "collective_test").caption


@pytest.mark.parametrize("split", ["train", "collective"])
def test_an_image_does_not_depend_on_its_batch(split):
    scenes = scene_batch(range(24), 3, split)
    whole = render(scenes, 48)
    alone = torch.cat([render([scene], 48) for scene in scenes])
    assert torch.equal(whole, alone)
    assert torch.equal(render_packed(pack_scenes(scenes).to("cpu"), 48), whole)


@pytest.mark.parametrize("size", [16, 33, 64])
def test_painting_in_layers_as_a_gpu_does_gives_the_same_pixels(size):
    packed = pack_scenes(scene_batch(range(80), 4) + scene_batch(range(40), 4, "collective"))
    assert torch.equal(render_packed(packed, size, in_layers=True), render_packed(packed, size, in_layers=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with a CPU")
@pytest.mark.parametrize("size", [16, 64, 112])
def test_a_gpu_draws_the_pixels_of_a_cpu(size):
    packed = pack_scenes(scene_batch(range(1000), 4) + scene_batch(range(1000), 4, "collective"))
    on_gpu = render_packed(packed.to("cuda"), size).cpu()
    assert torch.equal(on_gpu, render_packed(packed, size))


@pytest.mark.parametrize("split", SPLITS)
def test_the_tree_is_that_of_the_brackets(split):
    for scene in scene_batch(range(150), 5, split):
        assert scene.tree == parse_bracketed(scene.brackets, scene.caption)


def test_all_is_drawn_in_double_precision(monkeypatch):
    """Where single precision enters, devices disagree: a sum of whole numbers and a fraction is single by default."""
    seen = []
    for name, draw in SILHOUETTES.items():
        monkeypatch.setitem(SILHOUETTES, name, lambda u, v, draw=draw: (seen.append((u, v)), draw(u, v))[1])
    packed = pack_scenes(scene_batch(range(3), 4))
    render_packed(packed, 112)
    x, y, radius = packed.place.double().unbind(1)
    u, v = torch.cat([u for u, _ in seen]), torch.cat([v for _, v in seen])
    steps = torch.arange(112, dtype=torch.float64) + 0.5
    for part, centre in ((u[:, 0], x), (v[:, :, 0], y)):
        exact = (steps / 112 - centre[:, None]) / radius[:, None]  # of all columns, or lines
        assert ((part[:, :, None] - exact[:, None]).abs().amin(-1) < 1e-12).all()
