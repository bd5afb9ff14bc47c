"""Parsers are found by name; what cannot be parsed is known before a parser is asked."""

import pytest

from powerclip.annotate.parsers import PARSERS, load_parser
from powerclip.annotate.parsers.base import unparsable
from powerclip.annotate.parsers.english import is_english
from powerclip.data.trees import Span
from powerclip.errors import UserError


def test_the_flat_parser_makes_one_phrase_of_a_caption():
    first, second = load_parser("flat").parse(["A dog , running .", " ... "])
    assert first.spans == (Span(0, 15, "ROOT"),)
    assert first.fallback is None
    assert second.spans == ()
    assert second.fallback == "empty"


def test_a_mistyped_name_option_or_device_is_one_line():
    with pytest.raises(UserError, match=r"no parser is called 'embeded' \(did you mean 'embedded'\?\)"):
        load_parser("embeded")
    with pytest.raises(UserError, match=r"no option 'wieghts' \(did you mean 'weights'\?\)"):
        load_parser("embedded", "cpu", wieghts="x")
    with pytest.raises(UserError, match="the parser flat has no option 'weights'; it has none"):
        load_parser("flat", weights="x")
    with pytest.raises(UserError, match="--device: 'gpu' is not a device"):
        load_parser("embedded", "gpu")
    with pytest.raises(UserError, match="--device: cuda:99 is not there"):
        load_parser("embedded", "cuda:99")


def test_every_name_is_known():
    assert PARSERS == ["embedded", "stanza", "benepar", "flat"]


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        ("a dog", None),
        ("", "empty"),
        (" \r\n ", "empty"),
        ("... !?", "empty"),
        ("word " * 256, None),
        ("word " * 257, "too long"),
        ("狗坐在红色的椅子上", "not English"),
        ("😀🎉", None),
    ],
)
def test_captions_that_no_parser_is_asked_about(caption, reason):
    assert unparsable(caption) == reason


@pytest.mark.parametrize(
    "caption",
    [
        "a dog sitting on a red chair",
        "Café La Paz in Zürich",
        "La Casa de las Flores on a poster in Mexico",
        "2 + 2",
        "A man in a sombrero",
        "Ein Bier, bitte: sign at a bar",
        "poster with 犬 on it",
    ],
)
def test_english_with_foreign_names_is_english(caption):
    assert is_english(caption)


@pytest.mark.parametrize(
    "caption",
    [
        "ein Hund sitzt auf einem roten Stuhl und schläft",
        "un chien est assis sur une chaise dans la cuisine",
        "un perro sentado en una silla con las patas cruzadas",
        "собака сидит на красном стуле",
        "赤い椅子に座っている犬 dog",
    ],
)
def test_other_languages_are_not(caption):
    assert not is_english(caption)
