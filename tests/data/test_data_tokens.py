"""Tokens that know their characters, and trees over characters to phrases over tokens."""

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import SigLipTokenizer, SimpleTokenizer

from powerclip.alignment.phrases import Phrases
from powerclip.data.tokens import CaptionTokenizer, TokenizedCaption, pack_phrases
from powerclip.data.trees import Span, flat_tree, parse_bracketed, tree_from_spans
from powerclip.errors import UserError

CHAIR = "a dog sitting on a red chair"
CHAIR_TREE = "(ROOT (NP (NP (DT a) (NN dog)) (VP (VBG sitting) (PP (IN on) (NP (DT a) (JJ red) (NN chair))))))"

OPEN_CLIP = SimpleTokenizer()
TOKENIZER = CaptionTokenizer(OPEN_CLIP)
SHORT = CaptionTokenizer(OPEN_CLIP, context_length=8)
CLEANED = {clean: SimpleTokenizer(clean=clean) for clean in ("whitespace", "canonicalize")}


def said(tokens: TokenizedCaption, caption: str) -> list[str]:
    return [caption[start:end] for start, end in tokens.spans[1:-1]]


def leaf_texts(phrases: Phrases, tokens: TokenizedCaption, caption: str) -> list[str]:
    """The characters of each leaf of a batch of one caption."""
    ranges = zip(phrases.leaf_start.tolist(), phrases.leaf_end.tolist(), strict=True)
    return [caption[tokens.spans[start][0] : tokens.spans[end - 1][1]] for start, end in ranges]


def node_ranges(phrases: Phrases) -> list[tuple[int, int]]:
    return list(zip(phrases.node_start.tolist(), phrases.node_end.tolist(), strict=True))


# ---- ids -------------------------------------------------------------------------------------------------------------

ENGLISH = ["dog", "Isn't", "they'LL", "2024", "supercalifragilistic", "t-shirt", "...", "a_b", "“quoted”"]
UNICODE = [
    "😀",
    "👨‍👩‍👧",
    "👍🏽",
    "ﬁne",
    "ｆｕｌｌ",
    "İstanbul",
    "ǅ",
    "ſ",
    "e\u0301",
    "हिन्दी",
    "日本語",
    "\u200b",
    "\ufeff",
]
BROKEN = ["&amp;", "&lt;b&gt;", "&amp;amp;", "&#39;", "&nbsp;", "naÃ¯ve", "donâ€™t", "\x1b[31m", "\x00", "\x85", "\r\n"]
SPECIAL = ["<start_of_text>", "<END_OF_TEXT>", "</w>"]
odd = st.sampled_from([*ENGLISH, *UNICODE, *BROKEN, *SPECIAL])
captions = st.lists(odd | st.text(max_size=8), max_size=14).flatmap(
    lambda parts: st.sampled_from([" ", "", "  "]).map(lambda gap: gap.join(parts))
)


@given(captions)
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("context_length", [77, 8, 3])
def test_ids_are_those_of_open_clip_for_any_text(context_length: int, caption: str) -> None:
    tokens = CaptionTokenizer(OPEN_CLIP, context_length).encode(caption)
    expected = OPEN_CLIP(caption, context_length=context_length)[0]
    assert tokens.ids == expected[: len(tokens)].tolist()
    assert not expected[len(tokens) :].any()


@pytest.mark.parametrize("caption", ["", "   ", "word " * 200, "a" * 500, "😀" * 60, "&amp;" * 5000, "â€™" * 3000])
def test_ids_are_those_of_open_clip_when_empty_and_when_cut(caption: str) -> None:
    tokens = TOKENIZER.encode(caption)
    assert TOKENIZER.pad([tokens.ids], full=True).equal(OPEN_CLIP(caption))
    assert len(tokens) <= TOKENIZER.context_length


@pytest.mark.parametrize("clean", ["whitespace", "canonicalize"])
@given(caption=captions)
@settings(max_examples=60, deadline=None)
def test_ids_are_those_of_open_clip_for_its_other_ways_of_cleaning(clean: str, caption: str) -> None:
    other = CLEANED[clean]
    tokenizer = CaptionTokenizer(other)
    assert tokenizer.pad([tokenizer.encode(caption).ids], full=True).equal(other(caption))


def test_padding_is_to_the_longest_or_to_the_context() -> None:
    ids = [TOKENIZER.encode(caption).ids for caption in ["a dog", "a red dog", ""]]
    assert TOKENIZER.pad(ids).equal(OPEN_CLIP(["a dog", "a red dog", ""])[:, :5])
    assert TOKENIZER.pad(ids, full=True).equal(OPEN_CLIP(["a dog", "a red dog", ""]))
    assert TOKENIZER.pad([]).shape == (0, 0)


def test_a_tokenizer_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(TOKENIZER)).encode(CHAIR) == TOKENIZER.encode(CHAIR)


def test_tokenizers_without_offsets_are_refused() -> None:
    with pytest.raises(UserError, match="SigLipTokenizer"):
        CaptionTokenizer(SigLipTokenizer.__new__(SigLipTokenizer))
    with pytest.raises(UserError, match="reduction_mask"):
        CaptionTokenizer(SimpleTokenizer(reduction_mask="random"))


# ---- spans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A Dog,  red.", ["A", "Dog", ",", "red", "."]),
        ("it's 42", ["it", "'s", "4", "2"]),
        ("“It’s”", ["“", "It", "’s", "”"]),
        ("AT&amp;T", ["AT", "&amp;", "T"]),
        ("x &lt; y", ["x", "&lt;", "y"]),
        ("donâ€™t go", ["don", "â€™t", "go"]),
        ("naÃ¯ve cafÃ©", ["na", "Ã¯", "ve", "cafÃ©"]),
        ("ÐºÐ¾Ñ‚", ["Ðº", "Ð¾", "Ñ‚", "Ñ‚"]),
        ("a&nbsp;dog", ["a", "dog"]),
        ("ﬁne  day", ["ﬁne", "day"]),
        ("ｆｕｌｌ width", ["ｆｕｌｌ", "width"]),
        ("İt is", ["İ", "İ", "t", "is"]),
        ("\ufeffa \u200bdog", ["a", "\u200b", "dog"]),
        ("I ❤ it", ["I", "❤", "it"]),
    ],
)
def test_tokens_know_their_characters_in_the_raw_caption(caption: str, expected: list[str]) -> None:
    assert said(TOKENIZER.encode(caption), caption) == expected


def test_the_pieces_of_a_long_word_lie_end_to_end() -> None:
    word = "supercalifragilistic"
    pieces = said(TOKENIZER.encode(word), word)
    assert len(pieces) > 2
    assert "".join(pieces) == word


@given(captions)
@settings(deadline=None)
def test_spans_are_in_order_and_inside_the_caption(caption: str) -> None:
    tokens = TOKENIZER.encode(caption)
    assert len(tokens.ids) == len(tokens.spans) == len(tokens.words)
    assert all(0 <= start <= end <= len(caption) for start, end in tokens.spans)
    inner = [span for span in tokens.spans[1:-1] if span[0] < span[1]]
    assert all(one[0] <= other[0] and one[1] <= other[1] for one, other in pairwise(inner))
    assert tokens.spans[0] == (0, 0)
    assert tokens.spans[-1] == (len(caption), len(caption))


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="&"), max_size=60))
@settings(deadline=None)
def test_the_tokens_of_plain_text_are_its_characters(caption: str) -> None:
    assert "".join(said(TOKENIZER.encode(caption), caption)) == caption.replace(" ", "")


def test_both_ways_of_finding_characters_agree() -> None:
    """A no-break space sends the caption through open_clip's cleaning; everything else stays in its place."""
    plain, cleaned = f"{CHAIR}, isn't it? x", f"{CHAIR}, isn't it?\u00a0x"
    assert TOKENIZER.encode(cleaned) == TOKENIZER.encode(plain)


def test_punctuation_entities_and_the_ends_are_no_words() -> None:
    caption = "a dog's &quot;t-shirt&quot; 😀!"
    tokens = TOKENIZER.encode(caption)
    words = [text for text, word in zip(said(tokens, caption), tokens.words[1:-1], strict=True) if word]
    assert words == ["a", "dog", "'s", "t", "shirt", "😀"]
    assert not tokens.words[0]
    assert not tokens.words[-1]


# ---- phrases ---------------------------------------------------------------------------------------------------------


def test_the_papers_example_as_tokens() -> None:
    phrases = pack_phrases([parse_bracketed(CHAIR_TREE, CHAIR)], [TOKENIZER.encode(CHAIR)], length=9)
    assert phrases.words.tolist() == [[False, *[True] * 7, False]]
    assert phrases.leaf_start.tolist() == [1, 3, 4, 5]
    assert phrases.leaf_end.tolist() == [3, 4, 5, 8]
    assert node_ranges(phrases) == [(0, 4), (0, 1), (1, 4), (2, 4), (3, 4)]
    assert phrases.max_leaves == 4


def test_all_nodes_adds_the_single_words() -> None:
    phrases = pack_phrases([parse_bracketed(CHAIR_TREE, CHAIR)], [TOKENIZER.encode(CHAIR)], length=9, nodes="all")
    assert node_ranges(phrases) == [(0, 4), (0, 1), (1, 4), (1, 2), (2, 4), (2, 3), (3, 4)]


def test_what_the_cut_removed_is_dropped_and_equal_nodes_become_one() -> None:
    tokens = SHORT.encode(CHAIR)  # start, six words, end: "chair" is cut off
    phrases = pack_phrases([parse_bracketed(CHAIR_TREE, CHAIR)], [tokens], length=8)
    assert leaf_texts(phrases, tokens, CHAIR) == ["a dog", "sitting", "on", "a red"]

    shorter = CaptionTokenizer(OPEN_CLIP, context_length=5)  # "a dog sitting" is left
    tokens = shorter.encode(CHAIR)
    phrases = pack_phrases([parse_bracketed(CHAIR_TREE, CHAIR)], [tokens], length=5)
    assert leaf_texts(phrases, tokens, CHAIR) == ["a dog", "sitting"]
    assert node_ranges(phrases) == [(0, 2), (0, 1), (1, 2)]


def test_a_token_that_touches_two_leaves_goes_to_the_first() -> None:
    caption = "it isn't"
    tree = tree_from_spans([Span(0, 2, "NP"), Span(3, 8, "VP"), Span(5, 8, "ADVP")], caption)  # it | is | n't
    tokens = TOKENIZER.encode(caption)
    assert said(tokens, caption) == ["it", "isn", "'t"]
    phrases = pack_phrases([tree], [tokens], length=5)
    assert leaf_texts(phrases, tokens, caption) == ["it", "isn", "'t"]


@pytest.mark.parametrize(("caption", "expected"), [("", (1, 2)), ("  ", (1, 2)), ("?! -", (1, 3)), ("…", (1, 2))])
def test_a_caption_without_words_keeps_one_node_of_what_is_there(caption: str, expected: tuple[int, int]) -> None:
    phrases = pack_phrases([flat_tree(caption)], [TOKENIZER.encode(caption)], length=6)
    assert (phrases.leaf_start.item(), phrases.leaf_end.item()) == expected
    assert phrases.words.nonzero()[:, 1].tolist() == list(range(*expected))
    assert node_ranges(phrases) == [(0, 1)]


def test_a_batch_is_its_captions_end_to_end() -> None:
    texts = [CHAIR, "", "two dogs"]
    trees = [parse_bracketed(CHAIR_TREE, CHAIR), flat_tree(""), flat_tree("two dogs")]
    tokenized = [TOKENIZER.encode(text) for text in texts]
    batch = pack_phrases(trees, tokenized, length=9)
    alone = [pack_phrases([tree], [tokens], length=9) for tree, tokens in zip(trees, tokenized, strict=True)]
    assert batch.words.equal(torch.cat([one.words for one in alone]))
    for name in ("leaf_start", "leaf_end", "node_start", "node_end"):
        assert getattr(batch, name).equal(torch.cat([getattr(one, name) for one in alone]))
    assert batch.leaf_offsets.tolist() == [0, 4, 5, 6]
    assert batch.node_offsets.tolist() == [0, 5, 6, 7]
    assert batch.max_leaves == 4


@st.composite
def captions_with_trees(draw: st.DrawFn) -> tuple[str, list[Span]]:
    """A caption and spans that nest by construction, cut at any character."""
    caption = draw(captions)
    spans: list[Span] = []

    def grow(start: int, end: int, depth: int) -> None:
        if end - start < 1 or depth > 4:
            return
        cut = draw(st.integers(start, end))
        for left, right in ((start, cut), (cut, end)):
            if left < right and draw(st.booleans()):
                spans.append(Span(left, right, "NP"))
                grow(left, right, depth + 1)

    grow(0, len(caption), 0)
    return caption, spans


@given(captions_with_trees(), st.sampled_from([77, 12, 4, 2]), st.sampled_from(["phrases", "all"]))
@settings(max_examples=300, deadline=None)
def test_leaves_partition_the_word_tokens_and_nodes_are_runs_of_leaves(
    given_: tuple[str, list[Span]], context_length: int, nodes: str
) -> None:
    caption, spans = given_
    tokens = CaptionTokenizer(OPEN_CLIP, context_length).encode(caption)
    phrases = pack_phrases([tree_from_spans(spans, caption)], [tokens], length=len(tokens) + 2, nodes=nodes)

    words = phrases.words[0].tolist()
    if any(tokens.words):
        assert words == [*tokens.words, False, False]
    else:
        assert any(words)

    ranges = list(zip(phrases.leaf_start.tolist(), phrases.leaf_end.tolist(), strict=True))
    edges = [edge for leaf in ranges for edge in leaf]
    assert edges == sorted(edges)
    assert all(words[start] and words[end - 1] for start, end in ranges)
    assert sum(sum(words[start:end]) for start, end in ranges) == sum(words)

    ranges_of_nodes = node_ranges(phrases)
    assert len(ranges_of_nodes) >= 1
    assert len(set(ranges_of_nodes)) == len(ranges_of_nodes)
    assert all(0 <= start < end <= len(ranges) for start, end in ranges_of_nodes)
    assert ranges_of_nodes[0] == (0, len(ranges))
    assert phrases.max_leaves == len(ranges)
    if nodes == "all":
        assert {(leaf, leaf + 1) for leaf in range(len(ranges))} <= set(ranges_of_nodes)
