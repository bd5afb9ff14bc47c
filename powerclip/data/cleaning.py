"""Where the characters of a cleaned caption stood in the raw one.

open_clip cleans a caption before it tokenises it: mojibake, HTML entities, ligatures, quotes, spaces and case. It says
nothing about where, and phrases are stored as offsets of the raw caption.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher


class _Fold(dict[int, str]):
    """For `str.translate`: each character to the one that it is compared by, without case, width or curl of quotes."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        plain = unicodedata.normalize("NFKC", char).lower()[:1]
        # Always one for one, so that positions stay; and what is no space must not become one ("´" would).
        self[code] = plain if plain and plain.isspace() == char.isspace() else char
        return self[code]


_FOLD = _Fold({ord(curly): plain for curly, plain in zip("‘’‚‛“”„‟", "''''\"\"\"\"", strict=True)})
_CHUNK = re.compile(r"\S+")
_LONGEST_CHUNK = 200  # characters; the matcher takes cubic time on runs of one character


def align(clean: str, raw: str, end: int) -> list[tuple[int, int]]:
    """For the first `end` characters of the cleaned text, the characters of the raw caption that each stands for."""
    raw, clean = raw.translate(_FOLD), clean.translate(_FOLD)
    raw_chunks = [match.span() for match in _CHUNK.finditer(raw)]
    clean_chunks = [match.span() for match in _CHUNK.finditer(clean)]
    needed = sum(start < end for start, _ in clean_chunks)
    spans = [(0, 0)] * len(clean)
    for raw_start, raw_end, start, stop in _pair_chunks(raw, clean, raw_chunks, clean_chunks, needed):
        spans[start:stop] = _align_characters(clean[start:stop], raw[raw_start:raw_end], raw_start)
    return spans[:end]


def _pair_chunks(
    raw: str, clean: str, raw_chunks: list[tuple[int, int]], clean_chunks: list[tuple[int, int]], needed: int
) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of the raw and of the cleaned text that belong together, spaces being where one can tell.

    Cleaning seldom adds or removes a chunk between spaces; when it did, chunks that it left alone show the way.
    """
    if len(raw_chunks) == len(clean_chunks):
        yield from ((*one, *other) for one, other in zip(raw_chunks[:needed], clean_chunks, strict=False))
        return
    matcher = SequenceMatcher(
        None,
        [raw[start:end] for start, end in raw_chunks],
        [clean[start:end] for start, end in clean_chunks[:needed]],
        autojunk=False,
    )
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            yield from ((*one, *other) for one, other in zip(raw_chunks[i1:i2], clean_chunks[j1:j2], strict=True))
        elif kind == "replace":
            yield raw_chunks[i1][0], raw_chunks[i2 - 1][1], clean_chunks[j1][0], clean_chunks[j2 - 1][1]


def _align_characters(clean: str, raw: str, offset: int) -> list[tuple[int, int]]:
    """`align` within a chunk of the raw caption that begins at `offset`."""
    if raw == clean or max(len(raw), len(clean)) > _LONGEST_CHUNK:
        return _even_spans(len(clean), offset, offset + len(raw))
    spans: list[tuple[int, int]] = []
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, raw, clean, autojunk=False).get_opcodes():
        if kind == "insert":  # the second letter of a ligature
            spans += [spans[-1] if spans else (offset + i1, offset + i1)] * (j2 - j1)
        elif kind != "delete":
            spans += _even_spans(j2 - j1, offset + i1, offset + i2)
        elif spans and (rest := _CHUNK.match(raw, i1, i2)):  # the rest of an entity, "&amp;"
            spans[-1] = spans[-1][0], offset + rest.end()
    return spans


def _even_spans(count: int, start: int, end: int) -> list[tuple[int, int]]:
    """`count` characters over a range in even steps: mojibake is two or three characters for each one."""
    width = end - start
    firsts = [start + at * width // count for at in range(count)]
    return [(first, max(first + 1, after)) for first, after in zip(firsts, [*firsts[1:], end], strict=True)]
