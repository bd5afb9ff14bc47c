"""Scenes are reproducible, tell the truth, and keep the held-out combinations out."""

from itertools import pairwise

import pytest

from powerclip.data.scenes import (
    HELD_OUT,
    SPLITS,
    Scene,
    generate,
    scene_batch,
    test_scenes,
    zero_shot_classes,
    zero_shot_label,
)
from powerclip.data.scenes.layout import place_of, relation_of
from powerclip.data.scenes.vocabulary import COLOURS, PATTERNS, SEEN_COLOURS, SHAPES
from powerclip.errors import UserError


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return scene_batch(range(600), seed=3, split="train")


def test_a_scene_is_a_function_of_seed_split_and_index():
    assert generate(1, 5, "train") == generate(1, 5, "train")
    assert generate(1, 5, "train").caption == generate(1, 5, "train").caption
    others = [generate(2, 5, "train"), generate(1, 6, "train"), generate(1, 5, "test")]
    assert all(other.objects != generate(1, 5, "train").objects for other in others)


def test_scenes_do_not_change_between_versions():
    # A saved run names its data by numbers alone: another scene under the same number would make it unrepeatable.
    assert generate(0, 1, "train").caption == "this picture shows a blue cross above a small purple star"


def test_an_unknown_split_is_a_clear_error():
    with pytest.raises(UserError, match="did you mean 'train'"):
        generate(0, 0, "trian")


def test_one_to_four_objects_all_inside_the_frame_and_apart(scenes):
    assert {len(scene.objects) for scene in scenes} == {1, 2, 3, 4}
    for scene in scenes:
        boxes = [thing.box for thing in scene.objects]
        assert all(0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1 for x0, y0, x1, y1 in boxes)
        assert all(max(x1 - x0, y1 - y0) >= 0.18 for x0, y0, x1, y1 in boxes)
        for k, a in enumerate(boxes):
            for b in boxes[:k]:
                assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]


def test_no_two_objects_of_a_scene_share_shape_and_colour(scenes):
    for scene in scenes:
        looks = [(thing.shape, thing.colour) for thing in scene.objects]
        assert len(set(looks)) == len(looks)


def test_what_is_said_of_an_object_is_true_and_names_it_alone(scenes):
    for scene in scenes:
        for mention, thing in zip(scene.plan.mentions, scene.mentioned, strict=True):
            assert mention.shape == thing.shape
            assert mention.colour in (None, thing.colour)
            assert mention.size in (None, thing.size)
            assert mention.pattern in (None, thing.pattern)
            described = [
                other
                for other in scene.objects
                if other.shape == mention.shape and mention.colour in (None, other.colour)
            ]
            assert described == [thing]


def test_relations_are_true_and_plain_to_see(scenes):
    stated = 0
    for scene in scenes:
        for subject, kind, target in scene.plan.relations:
            a = scene.mentioned[subject]
            assert kind == (place_of(a) if target is None else relation_of(a, scene.mentioned[target]))
            stated += 1
    assert stated > 300


def test_relation_words_agree_with_the_boxes_behind_them(scenes):
    # Read from the text and the boxes alone, without the plan.
    checked = 0
    for scene in scenes:
        for (a, box_a), (b, box_b) in pairwise(scene.phrase_boxes):
            between = scene.caption[a.end : b.start].strip()
            if between in ("to the left of", "is to the left of", "left of", "sits left of"):
                assert box_a[2] <= box_b[0]
                checked += 1
            if between in ("below", "is below", "lies under", "under", "is lower than"):
                assert box_a[1] >= box_b[3]
                checked += 1
    assert checked > 20


def test_counted_lists_count_the_objects_of_the_picture():
    numbers = {"two": 2, "three": 3, "four": 4}
    counted = 0
    for scene in scene_batch(range(1500), seed=0, split="train"):
        number = numbers.get(scene.caption.split()[0].lower())
        if number:
            assert number == len(scene.objects)
            counted += 1
    assert counted > 20


def test_every_word_of_the_vocabulary_is_said(scenes):
    said = {word.strip(".,:").lower() for scene in scenes for word in scene.caption.split()}
    assert said >= {*SHAPES, *COLOURS, *PATTERNS, "small", "large", "left", "right", "above", "below"}


def test_captions_vary(scenes):
    captions = [scene.caption for scene in scenes]
    assert len(set(captions)) > 590
    assert len({scene.plan.frame for scene in scenes}) == 5
    lengths = [len(caption.split()) for caption in captions]
    assert 8 <= sum(lengths) / len(lengths) <= 20
    assert max(lengths) <= 36


@pytest.mark.parametrize("split", ["train", "test"])
def test_held_out_combinations_are_never_shown_nor_said(split):
    for scene in scene_batch(range(1000), seed=0, split=split):
        assert not {(thing.colour, thing.shape) for thing in scene.objects} & set(HELD_OUT)
        assert not {(mention.colour, mention.shape) for mention in scene.plan.mentions} & set(HELD_OUT)


def test_every_colour_and_every_shape_stays_in_training():
    assert all(len(colours) >= 6 for colours in SEEN_COLOURS.values())
    assert {colour for colours in SEEN_COLOURS.values() for colour in colours} == set(COLOURS)


def test_no_zero_shot_class_is_told_by_its_colour_or_its_shape_alone():
    for colour, shape in HELD_OUT:
        assert sum(other == colour for other, _ in HELD_OUT) == 2
        assert sum(other == shape for _, other in HELD_OUT) == 2


def test_zero_shot_scenes_show_one_held_out_object_and_cover_the_classes_evenly():
    names = zero_shot_classes()
    scenes = scene_batch(range(5 * len(names)), seed=0, split="zero_shot")
    labels = [zero_shot_label(scene) for scene in scenes]
    assert all(labels.count(label) == 5 for label in range(len(names)))
    for scene, label in zip(scenes, labels, strict=True):
        (only,) = scene.objects
        assert f"{only.colour} {only.shape}" == names[label]


def test_test_scenes_have_distinct_captions():
    scenes = test_scenes(400, 0)
    captions = {scene.caption.lower().rstrip(".") for scene in scenes}
    assert len(captions) == len(scenes) == 400
    assert {scene.split for scene in scenes} == {"test"}


def test_the_gold_tree_covers_the_caption_and_holds_every_object_phrase():
    for split in SPLITS:
        for scene in scene_batch(range(150), seed=1, split=split):
            tree = scene.tree
            covered = "".join(scene.caption[start:end] for start, end in tree.leaves)
            assert "".join(c for c in covered if c.isalpha()) == "".join(c for c in scene.caption if c.isalpha())
            spans = {(node.start, node.end) for node in tree.nodes}
            assert all((span.start, span.end) in spans for span, _ in scene.phrase_boxes)


def test_the_brackets_hold_the_caption_word_by_word(scenes):
    for scene in scenes:
        words = [part.split(")")[0] for part in scene.brackets.split(" ") if not part.startswith("(")]
        assert "".join(words) == scene.caption.replace(" ", "")
        assert scene.brackets.count("(") == scene.brackets.count(")")


def test_each_object_phrase_has_the_box_of_the_object_that_it_names(scenes):
    for scene in scenes:
        named = set()
        for span, box in scene.phrase_boxes:
            words = scene.caption[span.start : span.end].lower().split()
            assert words[0] in ("a", "an", "the")
            (thing,) = (thing for thing in scene.objects if thing.box == box)
            assert words[-1] == thing.shape
            assert set(words[1:-1]) <= {thing.colour, thing.size, thing.pattern}
            named.add(thing)
        assert named == set(scene.mentioned)


def test_articles_fit_the_word_that_follows(scenes):
    for scene in scenes:
        for article, word in pairwise(scene.caption.lower().split()):
            if article in ("a", "an"):
                assert (article == "an") == (word[0] in "aeiou"), scene.caption
