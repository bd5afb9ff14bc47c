"""Raw text to words, as treebanks cut it: punctuation and clitics apart, offsets into the raw text kept.

`It's a dog's life, isn't it?` is It 's a dog 's life , is n't it ?. Words with hyphens stay whole, as do numbers,
abbreviations, addresses and runs of the same sign.
"""

from __future__ import annotations

import re
from functools import lru_cache

from powerclip.data.trees import is_word

_LETTER = r"[^\W_][\u0300-\u036f]*"
_CLITIC = r"['’](?:s|re|ve|ll|d|m)(?!\w)"
_TOKEN = re.compile(
    rf"""
      (?!(?:cannot|gonna|wanna|gotta)\s)[a-z]+(?=\s)         # most words: first, because it is quick
    | <[A-Z]+>                                               # <PERSON>, what data sets put in the place of names
    | (?:https?://|www\.)[^\s<>"]*[\w/]
    | [\w.+-]+@[\w-]+(?:\.[\w-]+)+
    | [^\W_]+?(?=n['’`]t(?!\w))                              # do in don't
    | n['’`]t(?!\w)
    | {_CLITIC}
    | can(?=not(?!\w)) | (?:gon|wan)(?=na(?!\w)) | got(?=ta(?!\w))
    | (?:[^\W\d_]\.)+[^\W\d_]\.                              # U.S.
    | (?:mr|mrs|ms|dr|st|jr|sr|prof|etc|gen|lt|sgt|vs|approx|inc|ltd|co|corp|ft|mt|ave|blvd)\.(?=\s)
    | [^\W\d_]\.(?=\s+[^\W\d_])                              # J. in J. Smith, but a full stop after the last letter
    | \d+(?:[.,:/]\d+)+(?:{_LETTER})*                        # 1,000.5  9:30pm  9/11
    | (?:{_LETTER})+(?:(?!{_CLITIC})[-‐‑'’.](?:(?!n['’]t(?!\w)){_LETTER})+)*
    | ([^\w\s]|_)\1+                                         # ...  --  !!!
    | [^\w\s](?:\ufe0f|\u200d[^\w\s]|[\U0001f3fb-\U0001f3ff])*   # a sign; an emoji with what modifies it
    | \S
    """,
    re.VERBOSE | re.IGNORECASE,
)


Token = tuple[str, int, int, int, int]  # text, start, end; first character of a word in it, one past the last


def tokenize(text: str) -> list[tuple[str, int, int]]:
    """The words and signs of `text`, each with its first character and the one past its last."""
    tokens = []
    position = 0
    chunks = text.rstrip().split(" ")
    for number, chunk in enumerate(chunks, 1):
        for token, start, end, _, _ in cut(chunk, number == len(chunks)):
            tokens.append((token, position + start, position + end))
        position += len(chunk) + 1
    return tokens


def cut(chunk: str, last: bool) -> tuple[Token, ...]:
    """The tokens of what stands between two spaces; `last` when nothing follows. A token without a word ends at 0.

    Captions repeat their words, so the tokens of a chunk are cached.
    """
    return _remembered(chunk, last) if len(chunk) < 40 else _cut(chunk, last)


def _cut(chunk: str, last: bool) -> tuple[Token, ...]:
    tokens = []
    # What follows matters to a full stop: it may belong to an initial, but not to the last letter of all.
    for match in _TOKEN.finditer(chunk if last else chunk + " x", 0):
        start, end = match.span()
        if start >= len(chunk):
            break
        word = [at for at in range(start, end) if is_word(chunk[at])]
        tokens.append((match[0], start, end, word[0], word[-1] + 1) if word else (match[0], start, end, 0, 0))
    return tuple(tokens)


_remembered = lru_cache(maxsize=100_000)(_cut)
