"""Parse trees of captions: Penn brackets or character spans in, leaves and nodes as character offsets out.

Both input forms end in the same place: phrase spans over the raw caption, cut into words by one rule. So a tree that
was stored as spans and read back equals the tree that the parser's brackets gave.

A *leaf* is a lowest phrase (a constituent with no phrase inside: "a dog") or a single word that hangs under a higher
phrase ("sitting"). *Nodes* are the phrase-level constituents, root included. Punctuation belongs to no leaf.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from powerclip.errors import UserError

ROOT = "ROOT"  # label of a root that no phrase label describes better
WORD = "WORD"  # label of a node that is a single word, see `Tree.with_words`


@dataclass(frozen=True)
class Span:
    """A labelled constituent: characters `start` … `end`-1 of the raw caption."""

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Tree:
    """A caption's parse tree. Empty only when the caption has no word.

    `leaves` are ordered and disjoint; `nodes` are in pre-order (the root first), no two cover the same words, and each
    covers a contiguous run of leaves. Of a unary chain, `(S (VP …))`, the lowest label stays: it says most about what
    the words are.
    """

    leaves: tuple[tuple[int, int], ...]
    nodes: tuple[Span, ...]

    def with_words(self) -> Tree:
        """The tree whose nodes are all its leaves too: adds the single words that hang under a higher phrase."""
        taken = {(node.start, node.end) for node in self.nodes}
        words = [Span(start, end, WORD) for start, end in self.leaves if (start, end) not in taken]
        return replace(self, nodes=tuple(sorted((*self.nodes, *words), key=_preorder)))


def flat_tree(caption: str) -> Tree:
    """The tree of a caption whose structure is unknown: one phrase, the whole caption."""
    return tree_from_spans((), caption)


def tree_from_spans(spans: Sequence[Span], caption: str) -> Tree:
    """The tree whose phrases are `spans`, in any order; where two cover the same words the later label wins.

    A root is added when no span covers the whole caption. Spans without a word are left out.

    Raises:
        UserError: a span lies outside the caption, or two spans cross.
    """
    shape = caption.translate(_SHAPE)
    for span in spans:
        if not 0 <= span.start < span.end <= len(caption):
            raise UserError(
                f"phrase {span.start}:{span.end} lies outside its caption of {len(caption)} characters, "
                f"{shorten(caption)!r}; annotate the caption again"
            )
    spans = [span for span in spans if _WORD_CHARACTER.search(shape, span.start, span.end)]
    words = _words(shape, {edge for span in spans for edge in (span.start, span.end)})
    if not words:
        return Tree((), ())

    starts = [start for start, _ in words]
    labels = {(0, len(words)): ROOT}  # (first word, one past the last) → label
    for span in spans:
        phrase = bisect_left(starts, span.start), bisect_left(starts, span.end)
        if span.label not in _ROOT_LABELS or phrase not in labels:
            labels[phrase] = span.label or ROOT
    phrases = sorted(labels, key=lambda phrase: (phrase[0], -phrase[1]))
    _check_nesting(phrases, words, caption)

    def characters(first: int, end: int) -> tuple[int, int]:
        return words[first][0], words[end - 1][1]

    return Tree(
        leaves=tuple(characters(*leaf) for leaf in _leaves(phrases, len(words))),
        nodes=tuple(Span(*characters(*phrase), labels[phrase]) for phrase in phrases),
    )


def parse_bracketed(brackets: str, caption: str) -> Tree:
    """The tree that Penn-style `brackets`, `(ROOT (NP (DT a) (NN dog)))`, gives for the raw `caption`.

    Words are found in the caption by their letters and digits alone, so that whatever the parser's tokeniser did to
    quotes, brackets, dashes, slashes, contractions, capitals or accents does not matter. Words may also stand directly
    in a phrase: `(NP a dog)`.

    Raises:
        UserError: the text does not bracket, or its words are not those of the caption.
    """
    terminals, constituents = _read(brackets)
    spans_of_words = _locate(terminals, caption)
    spans = []
    for first, end, label in constituents:
        inside = [span for span in spans_of_words[first:end] if span]
        if inside:
            spans.append(Span(inside[0][0], inside[-1][1], label))
    return tree_from_spans(spans, caption)


def iter_bracketed(text: str) -> Iterator[str]:
    """The bracketed trees of a treebank file, one by one; a tree may run over several lines.

    Raises:
        UserError: a bracket is never closed, closes nothing, or text stands outside the brackets.
    """
    depth = start = 0
    for match in _ATOM.finditer(text):
        if match[0] == "(":
            start = match.start() if depth == 0 else start
            depth += 1
        elif depth == 0:
            where = _position(text, match.start())
            raise UserError(f"tree does not bracket: {match[0]!r} outside the brackets, {where}")
        elif match[0] == ")":
            depth -= 1
            if depth == 0:
                yield text[start : match.end()]
    if depth:
        raise UserError(f"tree does not bracket: {depth} never closed, from {_position(text, start)}")


def is_word(text: str) -> bool:
    """Whether `text` holds a letter, digit, mark or symbol: anything but punctuation, space and control characters."""
    return _WORD_CHARACTER.search(text.translate(_SHAPE)) is not None


def shorten(text: str, width: int = 60) -> str:
    """`text` on one line of at most `width` characters, for an error message."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


# ---- words ---------------------------------------------------------------------------------------------------------


class _Shape(dict[int, str]):
    """For `str.translate`: each character to one that says what it is, so that a small regex can find the words.

    `w` letter or digit, `m` mark, `s` symbol (emoji, currency), `j` joins two parts of a word, space for the rest.
    """

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = unicodedata.category(char)
        if char in "'’-‐‑.\u200d":
            shape = "j"
        elif char in "&%@#":  # read aloud, though Unicode counts them as punctuation
            shape = "s"
        elif char in "`´^~|<>¨¯¸":  # used as quotes and rules, though Unicode counts them as symbols
            shape = " "
        else:
            shape = {"L": "w", "N": "w", "M": "m", "S": "s"}.get(kind[0], " ")
        self[code] = shape
        return shape


_SHAPE = _Shape()
_WORD_CHARACTER = re.compile("[wms]")
_WORD = re.compile("[wm]+(?:j[wm]+)*|s[sm]*(?:js[sm]*)*")
_ROOT_LABELS = frozenset({"", ROOT, "TOP"})


def _words(shape: str, edges: set[int]) -> list[tuple[int, int]]:
    """The words of a caption. A phrase may begin inside what looks like one word ("it" + "'s"): cut at phrase edges."""
    bounds = sorted({0, len(shape)} | edges)
    return [match.span() for start, end in pairwise(bounds) for match in _WORD.finditer(shape, start, end)]


def _preorder(span: Span) -> tuple[int, int]:
    return span.start, -span.end


def _check_nesting(phrases: list[tuple[int, int]], words: list[tuple[int, int]], caption: str) -> None:
    """Raise when two phrases (in pre-order, as word ranges) cross."""
    around: list[tuple[int, int]] = []
    for first, end in phrases:
        while around and around[-1][1] <= first:
            around.pop()
        if around and end > around[-1][1]:
            one = caption[words[around[-1][0]][0] : words[around[-1][1] - 1][1]]
            other = caption[words[first][0] : words[end - 1][1]]
            raise UserError(
                f"phrases {shorten(one)!r} and {shorten(other)!r} cross: in a tree one must hold the other or "
                "they must be apart; annotate the caption again"
            )
        around.append((first, end))


def _leaves(phrases: list[tuple[int, int]], words: int) -> Iterator[tuple[int, int]]:
    """Word ranges of the leaves: the lowest phrases, and each word outside of them."""
    position = 0
    for (first, end), following in zip(phrases, [*phrases[1:], (words, words)], strict=True):
        if following[0] >= end:  # in pre-order a phrase inside would come next
            yield from ((word, word + 1) for word in range(position, first))
            yield first, end
            position = end
    yield from ((word, word + 1) for word in range(position, words))


# ---- brackets ------------------------------------------------------------------------------------------------------

_ATOM = re.compile(r"[()]|[^\s()]+")
_BRACKET_NAMES = re.compile(r"-[LR][RSC]B-")  # how treebanks write ( ) [ ] { }
_TRACE = "-NONE-"  # an empty element, which has no word in the caption
# A bracket with one word in it is a part-of-speech tag, (NN dog), unless it carries one of these: (NP dogs).
_PHRASE_LABEL = re.compile("(WH)?(ADJP|ADVP|NP|PP)|S(BAR|Q|BARQ|INV)?|(CONJ|Q|UC|V)P|FRAG|INTJ|LST|NAC|NX|PR[NT]|RRC|X")


def _read(brackets: str) -> tuple[list[str], list[tuple[int, int, str]]]:
    """The words of a bracketed tree, and its phrases in pre-order: (first word, one past the last, label)."""
    terminals: list[str] = []
    constituents: list[tuple[int, int, str]] = []
    open_: list[_Open] = []
    closed = False

    def fail(what: str, position: int) -> UserError:
        return UserError(f"tree does not bracket: {what} at {_position(brackets, position)} of {shorten(brackets)!r}")

    for match in _ATOM.finditer(brackets):
        atom, at = match[0], match.start()
        if closed:
            raise fail(f"{shorten(atom, 20)!r} after the end of the tree", at)
        if atom == "(":
            if open_:
                open_[-1].children += 1
            open_.append(_Open(at, len(terminals), len(constituents)))
            constituents.append((0, 0, ""))  # keeps the phrase's place in pre-order
        elif not open_:
            raise fail(f"{shorten(atom, 20)!r} outside the brackets", at)
        elif atom == ")":
            top = open_.pop()
            if not top.children and not top.words:
                raise fail("a bracket with no word in it", top.position)
            if top.label != _TRACE and (top.children or top.words > 1 or _PHRASE_LABEL.fullmatch(top.category)):
                constituents[top.slot] = top.first, len(terminals), top.category
            closed = not open_
        elif not open_[-1].children and not open_[-1].words and open_[-1].label is None:
            open_[-1].label = atom
        else:
            open_[-1].words += 1
            if open_[-1].label != _TRACE:
                terminals.append(atom)
    if open_:
        raise fail(f"{len(open_)} bracket{'s' * (len(open_) > 1)} never closed, the last one", open_[-1].position)
    if not closed:
        raise UserError("tree does not bracket: it is empty; write it like (NP (DT a) (NN dog))")
    return terminals, [constituent for constituent in constituents if constituent[1] > constituent[0]]


@dataclass
class _Open:
    """A bracket that is still open while reading."""

    position: int
    first: int  # number of words before it
    slot: int  # its place among the constituents
    label: str | None = None
    words: int = 0  # that stand directly in it
    children: int = 0

    @property
    def category(self) -> str:
        """The label without function and index: NP for NP-SBJ-1."""
        return re.split("[-=|]", self.label)[0] if self.label else ""


def _position(text: str, position: int) -> str:
    line = text.count("\n", 0, position)
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return f"line {line + 1}, column {column}" if line else f"character {column}"


# ---- brackets against the caption ----------------------------------------------------------------------------------


class _Fold(dict[str, str]):
    """A character to what is compared: letters and digits without case, accent or width; nothing for the rest."""

    def __missing__(self, char: str) -> str:
        folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", char).casefold())
        self[char] = "".join(part for part in folded if part.isalnum())
        return self[char]


_FOLD = _Fold({"¢": "cents"})  # tokenisers write it out


def _locate(terminals: list[str], caption: str) -> list[tuple[int, int] | None]:
    """Where in the caption each word of the tree stands; None for punctuation, and for a symbol that is not there."""
    shape = caption.translate(_SHAPE)
    letters = [(letter, at) for at, char in enumerate(caption) for letter in _FOLD[char]]
    spans_of_words: list[tuple[int, int] | None] = []
    read = 0  # letters used up
    end = 0  # characters used up
    for terminal in terminals:
        word = _BRACKET_NAMES.sub("", terminal)
        folded = "".join(_FOLD[char] for char in word)
        if "".join(letter for letter, _ in letters[read : read + len(folded)]) != folded:
            raise _mismatch(f"it has {terminal!r} where", terminals, caption, letters[read:])
        span = None
        if folded:
            span = letters[read][1], letters[read + len(folded) - 1][1] + 1
            read += len(folded)
        elif is_word(word):
            # "&", "$", an emoji: before the next letter, as it is or as the tokeniser changed it (£ to #).
            gap = letters[read][1] if read < len(letters) else len(caption)
            at = caption.find(word, end, gap)
            changed = _WORD_CHARACTER.search(shape, end, gap)
            span = (at, at + len(word)) if at >= 0 else changed.span() if changed else None
        end = span[1] if span else end
        spans_of_words.append(span)
    if read < len(letters):
        raise _mismatch("it has ended where", terminals, caption, letters[read:])
    return spans_of_words


def _mismatch(what: str, terminals: list[str], caption: str, left: list[tuple[str, int]]) -> UserError:
    rest = f"goes on with {shorten(caption[left[0][1] :], 30)!r}" if left else "has ended"
    return UserError(
        f"tree does not match its caption: {what} the caption {rest}; "
        f"tree {shorten(' '.join(terminals))!r}, caption {shorten(caption)!r}"
    )
