"""Hard negatives are false, grammatical, and not to be told from the truth by their text."""

import re
from collections import Counter
from itertools import pairwise

import pytest
import torch

from powerclip.data.scenes import HELD_OUT, NEGATIVE_KINDS, Scene, generate, hard_negatives, scene_batch
from powerclip.data.scenes.grammar import Relation
from powerclip.data.scenes.negatives import may_be_true
from powerclip.data.scenes.vocabulary import COLOURS, PATTERNS, SHAPES

SAME_WORDS = ("swap_obj", "swap_att")
SAME_LENGTH = ("replace_obj", "replace_att", *SAME_WORDS)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Scene, dict[str, str]]]:
    return [(scene, hard_negatives(scene)) for scene in scene_batch(range(900), seed=2, split="test")]


def words(caption: str) -> list[str]:
    return re.findall(r"[a-z]+", caption.lower())


def described(caption: str) -> list[tuple[str, frozenset[str]]]:
    """The (shape, adjectives) of each "a …" or "an …" noun phrase, read from the text alone."""
    objects = []
    adjectives: set[str] | None = None
    for word in words(caption):
        if word in ("a", "an"):
            adjectives = set()
        elif adjectives is not None and word in SHAPES:
            objects.append((word, frozenset(adjectives)))
            adjectives = None
        elif adjectives is not None and (word in COLOURS or word in PATTERNS or word in ("small", "large")):
            adjectives.add(word)
        else:
            adjectives = None
    return objects


def test_all_seven_kinds_occur_often(pairs):
    counts = Counter(kind for _, negatives in pairs for kind in negatives)
    assert set(counts) == set(NEGATIVE_KINDS)
    assert len(NEGATIVE_KINDS) == 7
    assert min(counts.values()) > 0.5 * len(pairs)


def test_negatives_are_the_same_every_time():
    assert hard_negatives(generate(4, 7, "test")) == hard_negatives(generate(4, 7, "test"))


def test_the_true_caption_counts_as_true(pairs):
    assert all(may_be_true(scene.plan, scene.objects) for scene, _ in pairs)


def test_a_changed_or_added_description_fits_no_object(pairs):
    # Read from the text and the objects, without the plan. Where the caption leaves an object out, the changed words
    # may by chance describe that one; the relations are then what is false.
    for scene, negatives in pairs:
        if len(scene.mentioned) < len(scene.objects):
            continue
        looks = [(thing.shape, {thing.colour, thing.size, thing.pattern}) for thing in scene.objects]
        for kind in ("replace_obj", "replace_att", "add_obj", "add_att"):
            if kind in negatives:
                fits = [
                    any(shape == s and said <= have for s, have in looks) for shape, said in described(negatives[kind])
                ]
                assert fits.count(False) == 1, (scene.caption, negatives[kind])


def test_a_turned_relation_is_false_of_the_picture(pairs):
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    for scene, _ in pairs:
        for k, (subject, kind, target) in enumerate(scene.plan.relations):
            turned = list(scene.plan.relations)
            turned[k] = Relation(subject, opposite[kind], target)
            assert not may_be_true(scene.plan._replace(relations=tuple(turned)), scene.objects)


def test_every_negative_differs_from_the_caption(pairs):
    assert all(negative != scene.caption for scene, negatives in pairs for negative in negatives.values())


def test_replaced_and_swapped_captions_are_as_long_as_the_true_one(pairs):
    for scene, negatives in pairs:
        for kind in SAME_LENGTH:
            if kind in negatives:
                # A repeated mention ("the red star") may gain or lose its colour.
                assert abs(len(words(negatives[kind])) - len(words(scene.caption))) <= 1


def test_swaps_only_move_words(pairs):
    for scene, negatives in pairs:
        if scene.plan.frame == "clauses":  # whose repeated mention follows the swap
            continue
        for kind in SAME_WORDS:
            if kind in negatives:
                kept = [
                    Counter(w for w in words(text) if w not in ("a", "an")) for text in (scene.caption, negatives[kind])
                ]
                assert kept[0] == kept[1]


def test_additions_only_add(pairs):
    for scene, negatives in pairs:
        before = Counter(described(scene.caption))
        if "add_obj" in negatives:
            after = Counter(described(negatives["add_obj"]))
            assert sum((after - before).values()) == 1
            assert not before - after
        if "add_att" in negatives:
            gone, new = (
                before - Counter(described(negatives["add_att"])),
                Counter(described(negatives["add_att"])) - before,
            )
            ((old_shape, old_said),), ((new_shape, new_said),) = gone, new
            assert old_shape == new_shape
            assert old_said < new_said
            assert len(new_said) == len(old_said) + 1


def test_negatives_never_use_held_out_combinations(pairs):
    held_out = {(colour, shape) for colour, shape in HELD_OUT}
    for _, negatives in pairs:
        for negative in negatives.values():
            assert not {(word, shape) for shape, said in described(negative) for word in said} & held_out


def test_the_text_alone_does_not_tell_the_negative(pairs):
    # A linear reader of words and word pairs, trained on some captions with their negatives, guesses on others.
    for kind in ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att"):
        texts = [(scene.caption, negatives[kind]) for scene, negatives in pairs if kind in negatives]
        split = len(texts) * 2 // 3
        accuracy = _blind_accuracy(texts[:split], texts[split:])
        assert accuracy < 0.6, kind


def _blind_accuracy(seen: list[tuple[str, str]], unseen: list[tuple[str, str]]) -> float:
    def grams(text: str) -> Counter[str]:
        tokens = words(text)
        return Counter(tokens + [f"{a} {b}" for a, b in pairwise(tokens)])

    frequency = Counter(gram for pair in seen for text in pair for gram in grams(text))
    columns = {gram: column for column, (gram, count) in enumerate(frequency.most_common(800)) if count > 3}

    def differences(texts: list[tuple[str, str]]) -> torch.Tensor:
        table = torch.zeros(len(texts), len(columns))
        for row, (true, false) in enumerate(texts):
            for text, sign in ((true, 1), (false, -1)):
                for gram, count in grams(text).items():
                    if gram in columns:
                        table[row, columns[gram]] += sign * count
        return table

    x, weight = differences(seen), torch.zeros(len(columns), requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1, weight_decay=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-(x @ weight)).mean().backward()
        optimizer.step()
    margin = differences(unseen) @ weight.detach()
    return float(((margin > 0).float() + 0.5 * (margin == 0).float()).mean())
