"""Hard negatives of a small corpus whose truth is known: they read well, are false, and cannot be guessed unseen."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import pytest
import torch
from PIL import Image

from powerclip.data.trees import parse_bracketed
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedded
from powerclip.evaluate.hard_negatives import KINDS, make_negatives
from powerclip.evaluate.hard_negatives.command import write_negatives
from powerclip.evaluate.hard_negatives.corpus import Corpus
from powerclip.evaluate.hard_negatives.sentences import is_plural, read_sentence, tokenize, vocabulary
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.readers import read_negatives
from powerclip.evaluate.tasks import HardNegatives

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


def test_what_suits_the_rest_of_a_caption_is_as_often_false(made_of_habits):
    captions, made = made_of_habits
    counted = Corpus([[tokenize(text)[0] for text in of_image] for of_image in captions])
    truth_suits = []
    for negative in made.negatives:
        if negative.kind != "replace_obj":
            continue
        old, new = changed(negative)
        others = set(negative.caption.split()) - {old}
        true, false = (sum(counted.coherence(word, others, negative.image)) for word in (old, new))
        if abs(true - false) > 1:
            truth_suits.append(true > false)
    # Half of the captions say what is usual, and hardly a change makes anything usual: a reader of habits would know.
    assert len(truth_suits) >= 20
    assert 0.4 <= sum(truth_suits) / len(truth_suits) <= 0.6


@pytest.fixture(scope="module")
def made_of_habits():
    """Dogs are mostly on the beach, and cats on the street, but not always."""
    usual = {"dog": "beach", "cat": "street", "horse": "field", "boy": "road", "girl": "hill"}
    others = list(usual.values())
    captions, trees = [], []
    for thing, place in usual.items():
        for number, (colour, relation) in enumerate(product(COLOURS * 2, ("on", "behind"))):
            start = number % 8  # so that what is usual is spread over even and odd images
            places = [*([place] * 4), *(other for other in others if other != place)]
            places = places[start:] + places[:start]
            for where in places:
                captions.append([f"a {colour} {thing} {relation} the {where}"])
                trees.append(parse_bracketed(brackets(colour, thing, relation, where), captions[-1][0]))
    return captions, make_negatives([text for (text,) in captions], list(range(len(captions))), trees)


def test_readers_of_a_words_length_its_place_or_its_commonness_are_right_in_half(made):
    common = Counter(word for negative in made.negatives for word in negative.caption.split())
    readers = {
        "length": lambda text: len(text),
        "first phrase": lambda text: hash(tuple(text.split()[:3])),
        "last word": lambda text: hash(text.split()[-1]),
        "commonness": lambda text: sum(common[word] for word in text.split()),
    }
    for name in ("length", "commonness"):
        scores = [(readers[name](one.caption), readers[name](one.negative)) for one in made.negatives]
        assert sum(true > false for true, false in scores) == sum(true < false for true, false in scores), name
    for name in ("first phrase", "last word"):
        told = [one for one in made.negatives if readers[name](one.caption) != readers[name](one.negative)]
        right = sum(readers[name](one.caption) > readers[name](one.negative) for one in told)
        assert abs(right / len(told) - 0.5) < 0.15, name


class KnownVectors:
    """An embedder whose images and texts are given."""

    def __init__(self, images: torch.Tensor, texts: dict[str, torch.Tensor]) -> None:
        self._images, self._texts = images, texts

    def images(self, source) -> Embedded:
        return Embedded(self._images, torch.ones(len(self._images), dtype=torch.bool), ())

    def texts(self, texts) -> torch.Tensor:
        return torch.stack([self._texts[text] for text in texts])


def test_what_the_texts_alone_suggest_is_told_apart_from_what_the_images_say():
    # Axes: what all images share, and dog or cat. The text tower likes "cat", and the images know what they show.
    images = torch.tensor([[1.0, 0.2], [1.0, -0.2]])
    texts = {"dog": torch.tensor([0.0, 1.0]), "cat": torch.tensor([0.9, -1.0])}
    task = HardNegatives(FileImages([]), torch.tensor([0, 1]), ["dog", "cat"], ["cat", "dog"], ["obj", "obj"])
    scored = task.score(KnownVectors(images, texts)).parts
    assert scored[""]["acc"] == 0.5  # right about the cat, wrong about the dog
    assert scored[""]["mean_image_acc"] == scored["obj"]["mean_image_acc"] == 0.5
    assert scored[""]["centred_acc"] == 1
    # A model that does not look has nothing left without the mean.
    blind = task.score(KnownVectors(torch.tensor([[1.0, 0.0]] * 2), texts)).parts[""]
    assert (blind["acc"], blind["centred_acc"]) == (0.5, 0)


def test_words_that_go_together_are_told_by_other_images_captions_alone():
    swims, sleeps = [("a", "dog", "swims")], [("a", "cat", "sleeps")]
    rest = [("a", "man", "runs")]
    counted = Corpus([swims, swims, sleeps, sleeps, rest, rest, rest, rest] * 20)
    assert min(counted.coherence("dog", ["swims"], 1)) > 0 > max(counted.coherence("dog", ["sleeps"], 1))
    alone = Corpus([swims] + [sleeps] * 60)
    assert alone.coherence("dog", ["swims"], 0) == (0, 0)


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
