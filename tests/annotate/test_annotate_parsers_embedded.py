"""The parser that ships: sensible trees for captions, valid spans for anything."""

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerclip.annotate.parsers import load_parser
from powerclip.annotate.parsers.embedded import WEIGHTS, EmbeddedParser
from powerclip.data.trees import Span, is_word, tree_from_spans

# Captions with phrases that are beyond doubt, checked by eye. What they leave out (where "with a bear" hangs) may go
# either way.
CAPTIONS = {
    "a dog sitting on a red chair": ["a dog", "sitting on a red chair", "on a red chair", "a red chair"],
    "Two people standing in the middle of an empty street with a bear on a rope .": [
        "Two people",
        "standing in the middle of an empty street with a bear on a rope",
        "the middle",
        "of an empty street",
        "an empty street",
        "a bear",
        "on a rope",
        "a rope",
    ],
    "A man riding a wave on top of a surfboard.": ["A man", "a wave", "on top of a surfboard", "a surfboard"],
    "three young boys playing soccer in the park": [
        "three young boys",
        "playing soccer in the park",
        "in the park",
        "the park",
    ],
    "a red circle above a blue star": ["a red circle", "above a blue star", "a blue star"],
    "black and white photo of an old train station in London": [
        "black and white photo",
        "an old train station",
        "in London",
    ],
    "A boy jumps into the blue pool water .": [
        "A boy",
        "jumps into the blue pool water",
        "into the blue pool water",
        "the blue pool water",
    ],
    "There are many boats in the harbor.": ["many boats", "in the harbor", "the harbor"],
    "Vector illustration of a cute cartoon cat holding a red balloon": [
        "Vector illustration",
        "a cute cartoon cat",
        "holding a red balloon",
        "a red balloon",
    ],
    "The man's dog isn't looking at the camera, but the woman is.": [
        "The man's dog",
        "looking at the camera",
        "at the camera",
        "the camera",
        "the woman",
    ],
    "SUNSET OVER THE OCEAN": ["OVER THE OCEAN", "THE OCEAN"],
    "A kitchen with a stove, microwave and refrigerator.": ["A kitchen", "a stove, microwave and refrigerator"],
    "<PERSON> arrives at the premiere of the film": ["PERSON", "the premiere", "of the film", "the film"],
    "a woman holding an umbrella next to a man who is reading a newspaper": [
        "a woman",
        "an umbrella",
        "a man",
        "is reading a newspaper",
        "a newspaper",
    ],
}


@cache
def loaded() -> EmbeddedParser:
    parser = load_parser("embedded", "cpu")
    assert isinstance(parser, EmbeddedParser)
    return parser


@pytest.fixture
def parser() -> EmbeddedParser:
    return loaded()


@pytest.mark.parametrize("caption", CAPTIONS)
def test_captions_have_the_phrases_that_a_reader_sees(parser, caption):
    (parsed,) = parser.parse([caption])
    phrases = {caption[span.start : span.end] for span in parsed.spans}
    assert set(CAPTIONS[caption]) <= phrases
    assert parsed.fallback is None


def test_phrases_are_labelled(parser):
    caption = "a dog sitting on a red chair"
    (parsed,) = parser.parse([caption])
    labels = {caption[span.start : span.end]: span.label for span in parsed.spans}
    assert labels["a dog"] == labels["a red chair"] == "NP"
    assert labels["on a red chair"] == "PP"
    assert labels["sitting on a red chair"] == "VP"


def test_spaces_line_ends_and_punctuation_do_not_move_the_phrases(parser):
    caption = "\r\n A dog,\tsitting  on\r\na red chair . \n"
    (parsed,) = parser.parse([caption])
    assert {"A dog", "on\r\na red chair", "a red chair"} <= {caption[span.start : span.end] for span in parsed.spans}
    assert (parsed.spans[0].start, parsed.spans[0].end) == (3, 34)


def test_a_caption_has_the_same_tree_alone_in_a_batch_and_padded(parser, monkeypatch):
    captions = [*CAPTIONS, "", "dog", *CAPTIONS]
    together = parser.parse(captions)
    assert together == [parsed for caption in captions for parsed in parser.parse([caption])]
    monkeypatch.setattr(parser.model, "_padded", lambda length: max(8, 4 * math.ceil(length / 4)))
    assert parser.parse(captions) == together


def test_more_captions_than_fit_at_once_keep_their_order(parser, monkeypatch):
    captions = list(CAPTIONS)
    together = parser.parse(captions)
    monkeypatch.setattr("powerclip.annotate.parsers.embedded._AT_ONCE", 3)
    assert parser.parse(captions) == together
    assert parser.parse([]) == []


def test_words_met_by_the_thousand_are_forgotten_and_met_again(parser, monkeypatch):
    before = parser.parse(list(CAPTIONS))
    monkeypatch.setattr("powerclip.annotate.parsers.model._MOST_WORDS", 10)
    assert parser.parse(list(CAPTIONS)) == before
    assert parser.parse(list(CAPTIONS)) == before


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        ("", "empty"),
        (" \r\n\t", "empty"),
        ("?!... --", "empty"),
        ("word " * 257, "too long"),
        ("dog " + "! ? " * 300, "too long"),
        ("赤い椅子に座っている犬", "not English"),
        ("ein Hund sitzt auf einem roten Stuhl und schläft", "not English"),
    ],
)
def test_what_cannot_be_parsed_is_flat_with_a_reason(parser, caption, reason):
    (parsed,) = parser.parse([caption])
    assert parsed.fallback == reason
    assert len(parsed.spans) == is_word(caption)


def test_a_caption_of_256_words_is_parsed(parser):
    caption = " ".join(["a dog on a chair and"] * 43)[: len("a dog on a chair and ") * 42 - 1]
    (parsed,) = parser.parse([caption])
    assert parsed.fallback is None
    assert len(parsed.spans) > 50


STRANGE = [
    "x" * 20_000,
    "😀😀 dog 👩‍👩‍👧 on a 🪑",
    "\x00\x01\x7fdog\ud800 cat\ufeff",
    "a\u0301 cafe\u0301 — naïve “quotes” …",
    "don't can't won't it's dogs' '90s",
    "....a....b....",
    "(((a dog)))",
    "http://example.org/" + "a/" * 500,
    "％＆ ａ ｄｏｇ",
    "٣ كلب dog dog dog",
    "_ _a_ b_c",
    "A.B.C. U.S.A. e.g. i.e.",
]


def assert_valid(caption: str, spans: tuple[Span, ...]) -> None:
    assert all(0 <= span.start < span.end <= len(caption) for span in spans)
    assert tree_from_spans(spans, caption).nodes == spans
    assert bool(spans) == is_word(caption)


@pytest.mark.parametrize("caption", STRANGE, ids=range(len(STRANGE)))
def test_strange_text_has_valid_phrases(parser, caption):
    (parsed,) = parser.parse([caption])
    assert_valid(caption, parsed.spans)


words = st.sampled_from(["a", "dog", "'s", "on", "n't", ",", "-", ".", "the", "\r\n", "U.S.", "😀", "é", "(", "’", "&"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=30), st.lists(words, max_size=15).map(" ".join)), max_size=4))
def test_any_text_has_valid_phrases(captions):
    parsed = loaded().parse(captions)
    assert len(parsed) == len(captions)
    for caption, tree in zip(captions, parsed, strict=True):
        assert_valid(caption, tree.spans)


def test_the_weights_fit_into_ten_megabytes_and_name_the_version(parser):
    assert WEIGHTS.stat().st_size <= 10_000_000
    assert parser.version.startswith("1-")
    assert len(parser.version) == 10


@pytest.mark.gpu
def test_a_gpu_gives_the_trees_of_the_cpu(parser):
    assert load_parser("embedded", "cuda").parse(list(CAPTIONS)) == parser.parse(list(CAPTIONS))
