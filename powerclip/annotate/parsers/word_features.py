"""What the embedded parser sees of a word: a place in its vocabulary, and hashed pieces of its letters.

The pieces (beginnings, endings, runs of three and four letters, and the word's shape) say enough about words that were
never seen. Everything here depends on the word alone, so that it is computed once for each word.
"""

from __future__ import annotations

import re
import unicodedata
import zlib

UNKNOWN, BEGIN, END = 0, 1, 2  # rows of the vocabulary that are no word
SPECIAL = ["<unknown>", "<begin>", "<end>"]
_ALIKE = {
    **dict.fromkeys(["``", "''", "“", "”", "„", "«", "»", "″"], '"'),
    **dict.fromkeys(["`", "‘", "’", "´"], "'"),
    **dict.fromkeys(["–", "—", "--", "---"], "--"),
    **dict.fromkeys(["…", "...", "…."], "..."),
    "<PERSON>": "John",  # a data set's mask of a name, read as one
}
_APOSTROPHES = str.maketrans("’‘`´", "''''")
_DIGIT = re.compile(r"\d")
_LONGEST = 40  # letters; what is longer keeps its two ends


def normalise(word: str) -> str:
    """The word as the parser knows it: one kind of quotes and dashes, compatible characters folded, digits as 0."""
    if not word.isascii():
        word = unicodedata.normalize("NFKC", word)
    word = _ALIKE.get(word, word).translate(_APOSTROPHES)
    if len(word) > _LONGEST:
        word = word[: _LONGEST // 2] + word[-_LONGEST // 2 :]
    return _DIGIT.sub("0", word)


def shape(word: str) -> str:
    """`Xx` for Dog, `XX` for NASA, `x-x` for t-shirt: runs of the same kind of character as one."""
    kinds = (
        "X" if char.isupper() else "x" if char.isalpha() else "0" if char.isdigit() else char if char in "-'./" else "*"
        for char in word
    )
    runs: list[str] = []
    for kind in kinds:
        if not runs or runs[-1] != kind:
            runs.append(kind)
    return "".join(runs[:8])


def pieces(word: str) -> list[str]:
    """The parts of a normalised word that are hashed."""
    lower = word.lower()
    marked = f"<{lower}>"
    parts = [f"shape {shape(word)}"]
    parts += [f"start {lower[:size]}" for size in range(1, min(5, len(lower)))]
    parts += [f"end {lower[-size:]}" for size in range(1, min(6, len(lower)))]
    parts += [f"in {marked[at : at + size]}" for size in (3, 4) for at in range(len(marked) - size + 1)]
    return parts


def hashed(word: str, buckets: int) -> list[int]:
    """Rows of the table of pieces for a normalised word; the same on every machine."""
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) % buckets for piece in pieces(word)]
