"""Hard negatives of a small corpus whose truth is known: they read well, are false, and cannot be guessed unseen."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import pytest
from PIL import Image

from powerclip.data.trees import parse_bracketed
from powerclip.errors import UserError
from powerclip.evaluate.hard_negatives import KINDS, make_negatives
from powerclip.evaluate.hard_negatives.command import write_negatives
from powerclip.evaluate.hard_negatives.corpus import Corpus
from powerclip.evaluate.hard_negatives.sentences import is_plural, read_sentence, tokenize, vocabulary
from powerclip.evaluate.readers import read_negatives

COLOURS, THINGS, PLACES = ("red", "blue", "green"), ("dog", "cat", "horse"), ("beach", "street", "field")


def brackets(colour: str, thing: str, relation: str, place: str) -> str:
    start = f"(NP (NP (DT a) (JJ {colour}) (NN {thing}))"
    return f"{start} (PP (IN {relation}) (NP (DT the) (NN {place}))))"


@pytest.fixture(scope="module")
def corpus():
    """Images with two captions each; where a dog is, one caption may say "puppy", and no caption says "cat"."""
    captions, owners, trees = [], [], []
    scenes = list(product(COLOURS, THINGS, ("on", "behind"), PLACES))
    # Some scenes are more common than others: sometimes the truth is likelier, sometimes the negative.
    scenes = [scene for number, scene in enumerate(scenes) for _ in range(1 + 7 * number % 4)]
    for image, (colour, thing, relation, place) in enumerate(scenes):
        other = "puppy" if thing == "dog" else thing
        for noun in (thing, other):
            captions.append(f"a {colour} {noun} {relation} the {place}")
            owners.append(image)
            trees.append(parse_bracketed(brackets(colour, noun, relation, place), captions[-1]))
    return captions, owners, trees


@pytest.fixture(scope="module")
def made(corpus):
    return make_negatives(*corpus)


def changed(negative) -> tuple[str, str]:
    pairs = zip(negative.caption.split(), negative.negative.split(), strict=True)
    [pair] = [(old, new) for old, new in pairs if old != new]
    return pair


def test_words_are_replaced_by_words_of_their_kind(made):
    kinds = {"replace_obj": {*THINGS, *PLACES, "puppy"}, "replace_att": {*COLOURS}, "replace_rel": {"on", "behind"}}
    assert made.counts()["replace_obj"] > 20
    for negative in made.negatives:
        assert set(changed(negative)) <= kinds[negative.kind]
        assert not ({changed(negative)[0]} & {*THINGS}) or changed(negative)[1] not in PLACES


def test_a_word_that_is_said_of_the_same_image_replaces_nothing(made, corpus):
    captions, owners, _ = corpus
    said = {owner: set() for owner in owners}
    for caption, owner in zip(captions, owners, strict=True):
        said[owner] |= set(caption.split())
    for negative in made.negatives:
        assert changed(negative)[1] not in said[negative.image]
        assert set(changed(negative)) != {"dog", "puppy"}  # where the one is, the other is said too


def test_a_reader_of_the_changed_words_alone_is_right_in_half(made):
    for kind in KINDS:
        counts = Counter(changed(negative) for negative in made.negatives if negative.kind == kind)
        assert all(counts[old, new] == counts[new, old] for old, new in counts)
        of_kind = [negative.prior for negative in made.negatives if negative.kind == kind]
        assert sum(of_kind) * 2 == len(of_kind)  # and so is the model of five words


def test_the_same_captions_and_seed_give_the_same_negatives(made, corpus):
    assert make_negatives(*corpus).negatives == made.negatives
    assert make_negatives(*corpus, seed=1).negatives != made.negatives
    assert all(count <= 10 for count in make_negatives(*corpus, most=10).counts().values())


def test_phrases_and_attributes_change_places_with_capitals_kept():
    text = "A brown dog chases the small cat ."
    tree = parse_bracketed(
        "(S (NP (DT A) (JJ brown) (NN dog)) (VP (VBZ chases) (NP (DT the) (JJ small) (NN cat))) (. .))", text
    )
    sentence = read_sentence(0, text, tree)
    assert sentence.swapped(*sentence.phrases) == "The small cat chases a brown dog ."
    assert sentence.exchanged(*sentence.slots["attribute"]) == "A small dog chases the brown cat ."
    assert sentence.replaced(2, "fox") == "A brown fox chases the small cat ."


def test_a_phrase_with_a_pronoun_stays_where_it_is():
    text = "a dog with its ball"
    tree = parse_bracketed("(NP (NP (DT a) (NN dog)) (PP (IN with) (NP (PRP$ its) (NN ball))))", text)
    assert len(read_sentence(0, text, tree).phrases) == 1


def test_roles_come_from_the_trees(corpus):
    captions, owners, trees = corpus
    words = vocabulary([read_sentence(*parts) for parts in zip(owners, captions, trees, strict=True)])
    assert words["attribute"] == {*COLOURS}
    assert words["preposition"] == {"on", "behind"}
    assert words["noun"] == {*THINGS, *PLACES, "puppy"}
    assert [is_plural(word) for word in ("dogs", "people", "glass", "bus")] == [True, True, False, False]


def test_an_images_own_captions_are_no_evidence():
    texts = [["a dog runs"], ["a dog runs", "a cat runs"], ["a cat sleeps"]]
    corpus = Corpus([[tokenize(text)[0] for text in captions] for captions in texts])
    assert corpus.seen(("dog", "runs"), image=2) == 2
    assert corpus.seen(("dog", "runs"), image=0) == 1
    assert corpus.seen(("cat", "runs"), image=1) == 0
    # Nobody but image 1 says that a cat runs: for it, a dog that runs is likelier.
    assert corpus.log_probability(("a", "dog", "runs"), 1, 1, 1) > corpus.log_probability(("a", "cat", "runs"), 1, 1, 1)


def test_words_of_a_kind_stand_in_the_same_places(corpus):
    captions, owners, _ = corpus
    images = [[] for _ in range(max(owners) + 1)]
    for caption, owner in zip(captions, owners, strict=True):
        images[owner].append(tokenize(caption)[0])
    counted = Corpus(images)
    assert counted.alike("cat", "horse") > 0.9
    assert counted.alike("cat", "beach") == 0
    both, expected = counted.exclusion.together("noun", "dog", "puppy")
    assert both > 2 * expected
    assert counted.exclusion.together("noun", "dog", "cat")[0] == 0


def test_the_file_is_one_that_evaluate_reads(tmp_path, corpus):
    captions, owners, _ = corpus
    for number in set(owners):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    rows = [f"{owner}.png,{caption}" for owner, caption in zip(owners, captions, strict=True)]
    (tmp_path / "data.csv").write_text("\n".join(["image,caption", *rows]))
    counts = write_negatives(tmp_path / "data.csv", tmp_path / "made" / "negatives.json", most=50, quiet=True)
    items = json.loads((tmp_path / "made" / "negatives.json").read_text())
    assert {"filename", "caption", "negative_caption", "kind"} == items["0"].keys()
    task = read_negatives(tmp_path / "made" / "negatives.json", [tmp_path])
    assert len(task.captions) == sum(counts.values()) == len(items)
    assert Counter(task.kinds) == {kind: count for kind, count in counts.items() if count}
    (tmp_path / items["0"]["filename"]).unlink()
    assert read_negatives(tmp_path / "made" / "negatives.json", [tmp_path]).missing > 0


def test_too_few_captions_or_another_suffix_is_an_error(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "data.csv").write_text("image,caption\na.png,a dog on the beach")
    with pytest.raises(UserError, match="no caption could be changed"):
        write_negatives(tmp_path / "data.csv", tmp_path / "negatives.json", most=50, quiet=True)
    assert not (tmp_path / "negatives.json").exists()
    with pytest.raises(UserError, match=r"a \.json file is expected"):
        write_negatives(tmp_path / "data.csv", tmp_path / "negatives.txt", most=50, quiet=True)
