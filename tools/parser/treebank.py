"""Bracketed trees as a parser learns from them: words, part-of-speech tags and labelled spans.

The gold treebank is split by document, so that no text is in two parts; silver captions are split by image.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from powerclip.annotate.parsers.lexicon import CHAIN
from powerclip.data.trees import iter_bracketed
from powerclip.errors import UserError

WHOLE = "ROOT"  # label of a whole sentence that is no phrase: two phrases side by side
_ATOM = re.compile(r"[()]|[^\s()]+")
_CATEGORY = re.compile("[-=|]")
_ROOTS = frozenset({"", "ROOT", "TOP"})
_TRACE = "-NONE-"
_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}


@dataclass(frozen=True)
class Sentence:
    """A tree over words. `spans` are (first word, one past the last, labels of the unary chain), in no set order.

    The whole sentence is always one of the spans, and no two spans cover the same words.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    spans: tuple[tuple[int, int, str], ...]
    document: str = ""


def read_sentence(brackets: str, document: str = "") -> Sentence:
    """The tree that well-formed `brackets` describe, without traces, functions and indices (NP for NP-SBJ-1)."""
    words: list[str] = []
    tags: list[str] = []
    chains: dict[tuple[int, int], list[str]] = {}
    open_: list[tuple[str, int]] = []
    previous = ""
    for atom in _ATOM.findall(brackets):
        if atom == "(":
            open_.append(("", len(words)))
        elif atom == ")":
            label, first = open_.pop()
            if previous == ")" and label not in _ROOTS and len(words) > first:
                chains.setdefault((first, len(words)), []).append(_CATEGORY.split(label)[0])
        elif previous == "(":
            open_[-1] = atom, open_[-1][1]
        elif open_[-1][0] != _TRACE:
            words.append(_BRACKETS.get(atom, atom))
            tags.append(open_[-1][0])
        previous = atom
    if words:
        chains.setdefault((0, len(words)), [WHOLE])
    spans = ((first, end, CHAIN.join(reversed(chain))) for (first, end), chain in chains.items())
    return Sentence(tuple(words), tuple(tags), tuple(spans), document)


def read_treebank(folder: Path) -> dict[str, list[Sentence]]:
    """The gold trees of a folder of GENRE_….ptb files as `train`, `dev` and `test`.

    Of each genre's documents in alphabetical order, the 5th of every nine is for `dev` and the 9th for `test`.

    Raises:
        UserError: there are no .ptb files, or one does not bracket.
    """
    genres: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*.ptb")):
        genres[genre(path.stem)].append(path)
    if not genres:
        raise UserError(f"no .ptb files in {folder}; give the folder of a treebank with --treebank")
    parts: dict[str, list[Sentence]] = {"train": [], "dev": [], "test": []}
    for paths in genres.values():
        for rank, path in enumerate(paths):
            part = {4: "dev", 8: "test"}.get(rank % 9, "train")
            try:
                trees = list(iter_bracketed(path.read_text(encoding="utf-8")))
            except UserError as error:
                raise UserError(f"{path}: {error}") from error
            parts[part] += [sentence for tree in trees if (sentence := read_sentence(tree, path.stem)).words]
    return parts


def genre(document: str) -> str:
    """`news` for the document GUM_news_nasa."""
    return document.removeprefix("GUM_").split("_")[0]


def read_silver(path: Path, learn_from: str = "") -> dict[str, list[Sentence]]:
    """A parser's trees of captions (lines of key, number, tree; gzipped) as `train` and `test`: 1 image in 20.

    Only captions whose key begins with `learn_from` are for `train`; `test` has those of every source.

    Raises:
        UserError: the file is not there, has other lines, or no key begins so.
    """
    if not path.is_file():
        raise UserError(f"{path} is not there; give a file of caption trees with --silver, or leave it out")
    parts: dict[str, list[Sentence]] = {"train": [], "test": []}
    for key, tree in _silver_lines(path):
        sentence = read_sentence(tree, key)
        part = "test" if zlib.crc32(key.encode()) % 20 == 0 else "train"
        if sentence.words and (part == "test" or key.startswith(learn_from)):
            parts[part].append(sentence)
    if not parts["train"]:
        raise UserError(f"{path}: no key begins with {learn_from!r}; give another --learn-from, or leave it out")
    return parts


def _silver_lines(path: Path) -> Iterator[tuple[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 3 or not fields[2].startswith("("):
                raise UserError(f"{path}, line {number}: a key, a caption number and a tree should stand here")
            yield fields[0], fields[2]
