"""What stanza and benepar return becomes phrases of the raw caption; what they cannot do becomes a flat tree."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerclip.annotate.parsers import load_parser
from powerclip.annotate.parsers.benepar_adapter import BeneparParser
from powerclip.annotate.parsers.library import LibraryParser, squeeze
from powerclip.annotate.parsers.stanza_adapter import StanzaParser
from powerclip.data.trees import Span, is_word, tree_from_spans
from powerclip.errors import UserError

CAPTION = "  It's a dog\r\non a  chair."
SQUEEZED = "It's a dog on a chair."
EXPECTED = {
    ("It's a dog\r\non a  chair", "S"),
    ("It", "NP"),
    ("s a dog\r\non a  chair", "VP"),  # the edge of a phrase is a word, not its apostrophe
    ("a dog\r\non a  chair", "NP"),
    ("a dog", "NP"),
    ("on a  chair", "PP"),
    ("a  chair", "NP"),
}


# ---- as stanza answers: sentences of words with offsets, and a tree whose leaves are those words -------------------


@dataclass
class StanzaTree:
    label: str
    children: tuple[StanzaTree, ...] = ()


def stanza_tree(brackets: str) -> StanzaTree:
    stack: list[tuple[str, list[StanzaTree]]] = []
    for atom in brackets.replace("(", " ( ").replace(")", " ) ").split():
        if atom == "(":
            stack.append(("", []))
        elif atom == ")":
            label, children = stack.pop()
            tree = StanzaTree(label, tuple(children))
            if not stack:
                return tree
            stack[-1][1].append(tree)
        elif not stack[-1][0]:
            stack[-1] = atom, stack[-1][1]
        else:
            stack[-1][1].append(StanzaTree(atom))
    raise AssertionError(brackets)


def stanza_document(text: str, words: list[str], brackets: str) -> SimpleNamespace:
    """A document of one sentence, as stanza 1.15 returns it; "It's" is a token of two words without offsets."""
    stanza_words, at = [], 0
    for word in words:
        start = text.index(word, at)
        at = start + len(word)
        parent = SimpleNamespace(start_char=start, end_char=at)
        stanza_words.append(SimpleNamespace(text=word, start_char=start, end_char=at, parent=parent))
    sentence = SimpleNamespace(words=stanza_words, constituency=stanza_tree(brackets))
    return SimpleNamespace(text=text, sentences=[sentence])


STANZA = stanza_document(
    SQUEEZED,
    ["It", "'s", "a", "dog", "on", "a", "chair", "."],
    "(ROOT (S (NP (PRP It)) (VP (VBZ 's) (NP (NP (DT a) (NN dog)) (PP (IN on) (NP (DT a) (NN chair))))) (. .)))",
)


class RecordedStanza(StanzaParser):
    """The adapter with a recorded answer in the place of the models."""

    def __init__(self) -> None:
        self.version = "recorded"

    def documents(self, texts):
        assert texts == [SQUEEZED]
        return [STANZA]


# ---- as spaCy answers with benepar in its pipeline: constituents as spans with the labels of their unary chain ------


@dataclass
class SpacySpan:
    start_char: int
    end_char: int
    _: SimpleNamespace = field(default_factory=SimpleNamespace)


def benepar_document(text: str, constituents: list[tuple[str, tuple[str, ...]]]) -> SimpleNamespace:
    spans = []
    for words, labels in constituents:
        start = text.index(words)
        spans.append(SpacySpan(start, start + len(words), SimpleNamespace(labels=labels)))
    sentence = SimpleNamespace(_=SimpleNamespace(constituents=iter(spans)))
    return SimpleNamespace(text=text, sents=iter([sentence]))


def benepar_answer() -> SimpleNamespace:
    return benepar_document(
        SQUEEZED,
        [
            ("It's a dog on a chair.", ("S",)),
            ("It", ("NP",)),
            ("'s a dog on a chair", ("VP",)),
            ("'s", ()),
            ("a dog on a chair", ("NP",)),
            ("a dog", ("NP",)),
            ("dog", ()),
            ("on a chair", ("PP",)),
            ("on", ()),
            ("a chair", ("NP",)),
            (".", ()),
        ],
    )


class RecordedBenepar(BeneparParser):
    def __init__(self) -> None:
        self.version = "recorded"

    def documents(self, texts):
        assert texts == [SQUEEZED]
        return [benepar_answer()]


@pytest.mark.parametrize("parser", [RecordedStanza(), RecordedBenepar()], ids=["stanza", "benepar"])
def test_a_recorded_answer_becomes_phrases_of_the_raw_caption(parser):
    (parsed,) = parser.parse([CAPTION])
    assert {(CAPTION[span.start : span.end], span.label) for span in parsed.spans} == EXPECTED
    assert parsed.fallback is None
    assert tree_from_spans(parsed.spans, CAPTION).nodes == parsed.spans


def test_of_a_unary_chain_the_lowest_label_stays_in_both():
    text = "go home"
    stanza = stanza_document(text, ["go", "home"], "(ROOT (S (VP (VB go) (ADVP (RB home)))))")
    benepar = benepar_document(text, [("go home", ("S", "VP")), ("home", ("ADVP",))])
    for parser, document in ((RecordedStanza(), stanza), (RecordedBenepar(), benepar)):
        nodes = tree_from_spans(parser.phrases(document), text).nodes
        assert nodes == (Span(0, 7, "VP"), Span(3, 7, "ADVP"))


def test_a_word_without_offsets_stands_where_its_token_stands():
    document = stanza_document("cannot go", ["cannot", "go"], "(ROOT (VP (MD cannot) (VP (VB go))))")
    document.sentences[0].words[0].start_char = None
    assert RecordedStanza().phrases(document)[1] == Span(0, 9, "VP")


def test_two_sentences_share_a_root():
    document = stanza_document("a dog. a cat.", ["a", "dog", "."], "(ROOT (NP (DT a) (NN dog) (. .)))")
    second = stanza_document("a dog. a cat.", ["a", "cat", "."], "(ROOT (NP (DT a) (NN cat) (. .)))").sentences[0]
    for word, (start, end) in zip(second.words, [(7, 8), (9, 12), (12, 13)], strict=True):
        word.start_char, word.end_char = start, end
    document.sentences.append(second)
    nodes = tree_from_spans(RecordedStanza().phrases(document), "a dog. a cat.").nodes
    assert nodes == (Span(0, 12, "ROOT"), Span(0, 5, "NP"), Span(7, 12, "NP"))


# ---- failures --------------------------------------------------------------------------------------------------------


class Moody(LibraryParser):
    """A library that fails over some captions."""

    name, version = "moody", "1"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def documents(self, texts):
        self.asked.append(texts)
        if any("bad" in text for text in texts):
            raise ValueError("no")
        return texts

    def phrases(self, document):
        if "cross" in document:
            return [Span(0, 8, "NP"), Span(4, 12, "NP")]
        if "beyond" in document:
            return [Span(0, 99, "NP")]
        return [Span(0, 5, "NP")]


def test_what_a_library_cannot_do_is_flat_and_counted_and_the_others_keep_their_trees():
    captions = ["a dog runs", "a bad dog", "", "a cross dog here", "beyond words", "狗在椅子上", "word " * 300]
    parsed = Moody().parse(captions)
    reasons = [None, "failed", "empty", "failed", "failed", "not English", "too long"]
    assert [tree.fallback for tree in parsed] == reasons
    assert parsed[0].spans == (Span(0, 10, "ROOT"), Span(0, 5, "NP"))
    for caption, tree in zip(captions[1:], parsed[1:], strict=True):
        assert len(tree.spans) == is_word(caption)


def test_nothing_to_parse_asks_nothing():
    parser = Moody()
    assert [tree.fallback for tree in parser.parse(["", " ... "])] == ["empty", "empty"]
    assert parser.parse([]) == []
    assert parser.asked == []


@given(st.text())
def test_squeezed_text_says_where_each_character_stood(caption):
    text, positions = squeeze(caption)
    assert len(text) == len(positions)
    assert positions == sorted(set(positions))
    assert all(char == caption[position] or char == " " for char, position in zip(text, positions, strict=True))
    assert "  " not in text
    assert text == text.strip(" ")


@pytest.mark.parametrize("name", ["stanza", "benepar"])
def test_a_missing_library_is_one_line_with_the_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"pip install 'powerclip\[{name}\]'"):
        load_parser(name, "cpu")


# ---- the real libraries, where they are ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stanza", "benepar"])
def test_the_library_keeps_the_contract(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'powerclip[{name}]'")
    try:
        parser = load_parser(name, "cpu")
    except UserError as error:
        pytest.skip(f"the models are not there: {error}")
    captions = ["a dog sitting on a red chair", CAPTION, "", "狗在椅子上", "😀 !!", "\x00\ud800 a dog", "word " * 300]
    parsed = parser.parse(captions)
    assert {"a dog", "on a red chair", "a red chair"} <= {captions[0][s.start : s.end] for s in parsed[0].spans}
    for caption, tree in zip(captions, parsed, strict=True):
        assert tree_from_spans(tree.spans, caption).nodes == tree.spans
