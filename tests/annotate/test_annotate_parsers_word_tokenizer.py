"""Captions are cut as treebanks cut them, and every piece knows where it stood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerclip.annotate.parsers.word_tokenizer import tokenize


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a dog sitting on a red chair", "a dog sitting on a red chair"),
        ("It's a dog's life, isn't it?", "It 's a dog 's life , is n't it ?"),
        ("Don’t touch the dogs’ food.", "Do n’t touch the dogs ’ food ."),
        ("I cannot stop; we're gonna win!!!", "I can not stop ; we 're gon na win !!!"),
        ("a black-and-white t-shirt", "a black-and-white t-shirt"),
        ("at 9:30pm on 9/11 for $1,000.50", "at 9:30pm on 9/11 for $ 1,000.50"),
        ("Mr. Smith in the U.S. in 1980s cars.", "Mr. Smith in the U.S. in 1980s cars ."),
        ("vitamin C. J. Smith", "vitamin C. J. Smith"),
        ('He said "go" (twice)...', 'He said " go " ( twice ) ...'),
        ("see www.example.org/a?b=c, or mail me@example.org.", "see www.example.org/a?b=c , or mail me@example.org ."),
        ("<PERSON> and black/white #dogs", "<PERSON> and black / white # dogs"),
        ("five o'clock rock'n'roll", "five o'clock rock'n'roll"),
        ("", ""),
        (" \r\n\t", ""),
    ],
)
def test_words_punctuation_and_clitics_come_apart(text, words):
    assert " ".join(token for token, _, _ in tokenize(text)) == words


def test_an_emoji_of_several_characters_is_one_word():
    assert [token for token, _, _ in tokenize("dogs👩‍👩‍👧 ❤️👍🏽")] == ["dogs", "👩‍👩‍👧", "❤️", "👍🏽"]


@given(st.text())
def test_tokens_are_the_text_without_its_spaces(text):
    tokens = tokenize(text)
    end = 0
    for token, start, stop in tokens:
        assert text[end:start].strip() == ""
        assert token == text[start:stop]
        assert token
        end = stop
    assert text[end:].strip() == ""
