"""Brackets and spans to trees: what is a leaf, what is a node, what matches its caption, what is refused."""

import gzip
import json
import os
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerclip.data.trees import Span, Tree, flat_tree, is_word, iter_bracketed, parse_bracketed, tree_from_spans
from powerclip.errors import UserError

CHAIR = "a dog sitting on a red chair"  # the example of §3.3
CHAIR_TREE = "(ROOT (NP (NP (DT a) (NN dog)) (VP (VBG sitting) (PP (IN on) (NP (DT a) (JJ red) (NN chair))))))"


def leaves(tree: Tree, caption: str) -> list[str]:
    return [caption[start:end] for start, end in tree.leaves]


def nodes(tree: Tree, caption: str) -> list[tuple[str, str]]:
    return [(node.label, caption[node.start : node.end]) for node in tree.nodes]


# ---- leaves and nodes ----------------------------------------------------------------------------------------------


def test_the_papers_example_has_its_leaves_and_nodes() -> None:
    tree = parse_bracketed(CHAIR_TREE, CHAIR)
    assert leaves(tree, CHAIR) == ["a dog", "sitting", "on", "a red chair"]
    assert nodes(tree, CHAIR) == [
        ("NP", CHAIR),
        ("NP", "a dog"),
        ("VP", "sitting on a red chair"),
        ("PP", "on a red chair"),
        ("NP", "a red chair"),
    ]


def test_all_nodes_adds_the_single_words_in_their_places() -> None:
    tree = parse_bracketed(CHAIR_TREE, CHAIR)
    assert leaves(tree.with_words(), CHAIR) == leaves(tree, CHAIR)
    assert nodes(tree.with_words(), CHAIR)[2:5] == [
        ("VP", "sitting on a red chair"),
        ("WORD", "sitting"),
        ("PP", "on a red chair"),
    ]
    assert len(tree.with_words().nodes) == len(tree.nodes) + 2


def test_a_phrase_of_one_word_is_a_leaf_and_a_node() -> None:
    tree = parse_bracketed("(ROOT (VP (VBG eating) (NP (NN broccoli))))", "eating broccoli")
    assert leaves(tree, "eating broccoli") == ["eating", "broccoli"]
    assert nodes(tree, "eating broccoli") == [("VP", "eating broccoli"), ("NP", "broccoli")]


def test_a_unary_chain_is_one_node_with_the_lowest_label() -> None:
    tree = parse_bracketed("(ROOT (S (VP (VBG running) (ADVP (RB fast)))))", "running fast")
    assert nodes(tree, "running fast") == [("VP", "running fast"), ("ADVP", "fast")]


def test_punctuation_belongs_to_no_leaf_and_makes_no_node() -> None:
    caption = '"A dog", (big), runs.'
    tree = parse_bracketed(
        "(ROOT (S (`` ``) (NP (NP (DT A) (NN dog)) ('' '') (, ,) (PRN (-LRB- -LRB-) (ADJP (JJ big)) (-RRB- -RRB-))"
        " (, ,)) (VP (VBZ runs)) (X (. .))))",
        caption,
    )
    assert leaves(tree, caption) == ["A dog", "big", "runs"]
    assert nodes(tree, caption) == [
        ("S", 'A dog", (big), runs'),
        ("NP", 'A dog", (big'),
        ("NP", "A dog"),
        ("ADJP", "big"),
        ("VP", "runs"),
    ]


def test_phrases_that_differ_by_punctuation_alone_are_one() -> None:
    tree = parse_bracketed("(ROOT (S (NP (DT a) (NN dog)) (. .)))", "a dog .")
    assert nodes(tree, "a dog .") == [("NP", "a dog")]


@pytest.mark.parametrize("caption", ["", "   ", "...", "?! —", "\u200b"])
def test_a_caption_without_words_has_an_empty_tree(caption: str) -> None:
    assert flat_tree(caption) == Tree((), ())


def test_a_flat_tree_is_one_phrase() -> None:
    assert flat_tree(" two dogs! ") == Tree(((1, 9),), (Span(1, 9, "ROOT"),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [(text, True) for text in ("dog", "7", "😀", "&", "é", "हि", "'s")]
    + [(text, False) for text in (".", "“", " ", "`", "", "—")],
)
def test_words_hold_a_letter_digit_or_symbol(text: str, expected: bool) -> None:
    assert is_word(text) is expected


# ---- what treebanks write ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brackets", "caption", "expected"),
    [
        ("( (NP (NP (DT a) (NN dog)) (RB here)))", "a dog here", ["a dog", "here"]),
        ("((NP (NP a dog) here))", "a dog here", ["a dog", "here"]),
        ("(S (NP-SBJ-1 (NNS dogs)) (VP (VBP bark) (S (NP-SBJ (-NONE- *-1)))))", "Dogs bark", ["Dogs", "bark"]),
        ("(S (NP (PRP it)) (VP (VBZ 's) (ADJP (JJ red))))", "It’s red", ["It", "s", "red"]),
        ("(S (NP (PRP they)) (VP (VBP do) (RB n't) (VP (VB go))))", "they don't go", ["they", "don't", "go"]),
        ("(S (NP (PRP I)) (VP (VBP gon) (S (VP (TO na) (VP (VB go))))))", "I gonna go", ["I", "gon", "na", "go"]),
        ("(NP (NP (NN black) (CC and\\/or) (NN white)) (NP (CD 1\\/2)))", "black and/or white ½", None),
        ("(NP (NP (DT a) (NN sign)) (-LSB- -LSB-) (NP (NN stop)) (-RSB- -RSB-))", "a sign [stop]", ["a sign", "stop"]),
        ("(NP (NP (NN cafe)) (: ...) (NP (NN menu)))", "Café … menu", ["Café", "menu"]),
        ("(NP (NP ($ $) (CD 5)) (NP (CD 9) (NN %)))", "$5 9%", ["$5", "9%"]),
        ("(NP (NP (# #) (CD 5)) (NN note))", "£5 note", ["£5", "note"]),
        ("(NP (NP (CD 5) (NNS cents)) (NN coin))", "5¢ coin", ["5¢", "coin"]),
        ("(NP (NP (NN U.S.)) (NN flag) (. .))", "U.S. flag", ["U.S", "flag"]),
        ("(NP (NP (NN love)) (SYM 😀))", "love 😀", ["love", "😀"]),
        ("(NP\n  (NP (DT a)\n      (NN dog))\n  (NN toy))\n", "a dog toy", ["a dog", "toy"]),
        ("(NP (NN dog))", "dog", ["dog"]),
    ],
)
def test_brackets_match_the_raw_caption(brackets: str, caption: str, expected: list[str] | None) -> None:
    tree = parse_bracketed(brackets, caption)
    if expected is not None:
        assert leaves(tree, caption) == expected
    assert tree_from_spans(tree.nodes, caption) == tree


def test_function_labels_and_indices_are_left_out() -> None:
    tree = parse_bracketed("(S (NP-SBJ=2 (NN dog)) (VP|S (VBZ is) (ADJP-PRD (JJ big))))", "dog is big")
    assert [node.label for node in tree.nodes] == ["S", "NP", "VP", "ADJP"]


def test_a_treebank_file_gives_its_trees_one_by_one() -> None:
    text = "(ROOT\n  (NP (NN a)))\n\n(ROOT (NP (NN b)))\n"
    assert list(iter_bracketed(text)) == ["(ROOT\n  (NP (NN a)))", "(ROOT (NP (NN b)))"]


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brackets", "message"),
    [
        ("(NP (DT a) (NN dog)", "does not bracket.*1 bracket never closed.*character 1 "),
        ("(NP (DT a) (NN dog)))", "does not bracket.*'\\)' after the end of the tree at character 21"),
        ("(NP (DT a)\n (NN dog)))", "line 2, column 11"),
        ("(NP a) (NP dog)", "after the end of the tree at character 8"),
        ("a dog", "'a' outside the brackets at character 1"),
        ("(NP (DT) (NN dog))", "no word in it at character 5"),
        ("  ", "it is empty"),
        ("(NP (DT a) (NN cat))", "it has 'cat' where the caption goes on with 'dog'.*tree 'a cat', caption 'a dog'"),
        ("(NP (DT a) (NN dog) (NN toy))", "it has 'toy' where the caption has ended"),
        ("(NP (DT a))", "it has ended where the caption goes on with 'dog'"),
    ],
)
def test_a_tree_that_does_not_bracket_or_match_is_refused_in_one_line(brackets: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_bracketed(brackets, "a dog")
    assert "\n" not in str(error.value)


def test_long_texts_are_shortened_in_the_message() -> None:
    with pytest.raises(UserError) as error:
        parse_bracketed("(NP " + "dog " * 500 + "cat)", "dog " * 501)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("text", ["(NP a", "(NP a))", "word (NP a)"])
def test_a_treebank_file_that_does_not_bracket_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="does not bracket"):
        list(iter_bracketed(text))


def test_spans_that_cross_are_refused() -> None:
    with pytest.raises(UserError, match="'a big' and 'big dog' cross"):
        tree_from_spans([Span(0, 5, "NP"), Span(2, 9, "NP")], "a big dog")


@pytest.mark.parametrize("span", [Span(0, 99, "NP"), Span(-1, 3, "NP"), Span(3, 3, "NP"), Span(4, 2, "NP")])
def test_spans_outside_the_caption_are_refused(span: Span) -> None:
    with pytest.raises(UserError, match="outside its caption of 5 characters"):
        tree_from_spans([span], "a dog")


# ---- properties ----------------------------------------------------------------------------------------------------

texts = st.lists(
    st.sampled_from(
        ["a", "dog", "isn't", "t-shirt", "😀", "👨‍👩‍👧", "❤️", "é", "…", "“", ",", "&amp;", "हिन्दी", "3.5", "-"]
    )
    | st.text(max_size=6),
    max_size=12,
).map(" ".join)


@st.composite
def nested_spans(draw: st.DrawFn, caption: str) -> list[Span]:
    """Spans that nest by construction, cut anywhere: between words, inside of them, around punctuation."""
    spans: list[Span] = []

    def grow(start: int, end: int, depth: int) -> None:
        if end - start < 1 or depth > 4 or not draw(st.booleans()):
            return
        left, right = sorted((draw(st.integers(start, end)), draw(st.integers(start, end))))
        if left < right:
            spans.append(Span(left, right, draw(st.sampled_from(["NP", "VP", "PP", "ROOT"]))))
            cut = draw(st.integers(left, right))
            grow(left, cut, depth + 1)
            grow(cut, right, depth + 1)
        grow(start, left, depth + 1)
        grow(right, end, depth + 1)

    grow(0, len(caption), 0)
    return spans


captions_with_spans = texts.flatmap(lambda text: st.tuples(st.just(text), nested_spans(text)))


@given(captions_with_spans)
def test_leaves_hold_every_word_character_once_and_nodes_are_runs_of_leaves(given_: tuple[str, list[Span]]) -> None:
    caption, spans = given_
    tree = tree_from_spans(spans, caption)
    edges = [edge for leaf in tree.leaves for edge in leaf]
    assert edges == sorted(edges)
    assert all(start < end for start, end in tree.leaves)
    outside = [0, *edges, len(caption)]
    assert not any(is_word(caption[start:end]) for start, end in zip(outside[::2], outside[1::2], strict=True))
    starts, ends = {start for start, _ in tree.leaves}, {end for _, end in tree.leaves}
    assert all(node.start in starts and node.end in ends for node in tree.nodes)
    assert len({(node.start, node.end) for node in tree.nodes}) == len(tree.nodes)
    assert bool(tree.nodes) == is_word(caption)
    if tree.nodes:
        assert (tree.nodes[0].start, tree.nodes[0].end) == (tree.leaves[0][0], tree.leaves[-1][1])


@given(captions_with_spans, st.booleans(), st.randoms(use_true_random=False))
def test_a_tree_survives_being_stored_as_spans(given_: tuple[str, list[Span]], words: bool, random) -> None:
    caption, spans = given_
    tree = tree_from_spans(spans, caption)
    tree = tree.with_words() if words else tree
    shuffled = list(tree.nodes)
    random.shuffle(shuffled)
    assert tree_from_spans(shuffled, caption) == tree


# (in the tree, in the caption, a word)
written = st.one_of(
    st.sampled_from([("dog", "dog"), ("a", "A"), ("t-shirt", "t-shirt"), ("café", "Café"), ("ok", "“ok”")]).map(
        lambda word: (*word, True)
    ),
    st.sampled_from([("``", '"'), ("-LRB-", "("), (",", ","), ("--", "—")]).map(lambda mark: (*mark, False)),
)
structures = st.recursive(
    st.lists(written, min_size=1, max_size=3).map(tuple),
    lambda inner: st.lists(written | inner, min_size=1, max_size=4).map(tuple),
    max_leaves=8,
)


@given(structures)
@settings(max_examples=200)
def test_brackets_give_the_leaves_and_nodes_of_the_definition(structure: tuple) -> None:
    """Against the definition written out by hand over the structure that the brackets were made from."""
    caption = ""

    def write(part: tuple) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]], tuple[int, int] | None]:
        """Brackets, leaves, nodes and extent of a phrase."""
        nonlocal caption
        inside: list[str] = []
        words: list[tuple[int, int]] = []
        phrases: list[tuple[int, int]] = []
        parts: list[tuple[int, int]] = []
        for child in part:
            if isinstance(child[0], str):
                in_tree, in_caption, word = child
                caption += " " + in_caption
                core = in_caption.strip("“”")
                start = len(caption) - len(in_caption) + in_caption.index(core)
                inside.append(f"(T {in_tree})")
                if word:
                    words.append((start, start + len(core)))
                    parts.append(words[-1])
            else:
                brackets, child_leaves, child_nodes, _ = write(child)
                inside.append(brackets)
                parts += child_leaves
                phrases += child_nodes
        extent = (parts[0][0], parts[-1][1]) if parts else None
        lowest = [extent] if extent and not phrases else parts
        return f"(NP {' '.join(inside)})", lowest, [*([extent] if extent else []), *phrases], extent

    brackets, expected_leaves, expected_nodes, _ = write(structure)
    tree = parse_bracketed(brackets, caption)
    assert list(tree.leaves) == expected_leaves
    assert {(node.start, node.end) for node in tree.nodes} == set(expected_nodes)


@given(st.text(alphabet="() abNP\n-", max_size=40), st.text(alphabet="ab ", max_size=8))
def test_any_text_gives_a_tree_or_a_user_error(brackets: str, caption: str) -> None:
    try:
        tree = parse_bracketed(brackets, caption)
    except UserError:
        return
    assert tree_from_spans(tree.nodes, caption) == tree


# ---- real trees ----------------------------------------------------------------------------------------------------


def data(folder: str) -> Path:
    root = os.environ.get("POWERCLIP_DATA")
    if not root or not (path := Path(root) / folder).is_dir():
        pytest.skip(f"needs {folder}/ in the folder that POWERCLIP_DATA names")
    return path


def test_the_stanford_parsers_trees_match_the_captions_they_were_made_from() -> None:
    folder = data("captions10k")
    captions: dict[str, list[str]] = {}
    for shard in ["val-000.tar", "train-010.tar"]:  # Flickr8k and COCO
        with tarfile.open(folder / shard) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    captions[member.name.removesuffix(".json")] = json.load(tar.extractfile(member))["captions"]
    seen = matched = 0
    with gzip.open(folder / "trees.tsv.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            key, number, brackets = line.rstrip("\n").split("\t")
            if key in captions:
                caption = captions[key][int(number)]
                seen += 1
                try:
                    tree = parse_bracketed(brackets, caption)
                except UserError:
                    continue
                matched += 1
                assert tree_from_spans(tree.nodes, caption) == tree
    assert seen > 5000
    assert matched / seen >= 0.999


def test_gold_treebank_trees_match_their_sentences() -> None:
    folder = data("treebank")
    seen = 0
    for path in sorted(folder.glob("*.ptb"))[::3]:
        for brackets in iter_bracketed(path.read_text(encoding="utf-8")):
            words = re.findall(r"(?<=\s)[^\s()]+", re.sub(r"\(-NONE- [^()]*\)", "", brackets))  # labels follow a "("
            sentence = " ".join(words).replace("-LRB-", "(").replace("-RRB-", ")")
            sentence = re.sub(r" (n['’]t|['’]\w+|[.,;:?!)])", r"\1", sentence)
            tree = parse_bracketed(brackets, sentence)
            assert tree_from_spans(tree.nodes, sentence) == tree
            seen += 1
    assert seen > 500
