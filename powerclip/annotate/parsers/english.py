"""Whether a caption is English enough for an English parser: a quick look at its letters and its small words."""

from __future__ import annotations

import re

_LETTER = re.compile(r"[^\W\d_]")
_LATIN = re.compile(r"[A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff]")
_SMALL = re.compile(r"[^\W\d_]+")
# Words that carry a sentence's grammar. Those that two languages share ("in", "die", "no", "me") are in neither list.
_ENGLISH = """
    the an of on with and is are at to his her their its this that there from by for over under near into while
    two three some it he she they who which as has have was were be being out up down one
"""
_OTHERS = {
    "German": "der das und ein eine einem einen einer mit auf ist im dem zwei vor",
    "French": "le la les un une des et dans sur avec est du au aux deux",
    "Spanish": "el los las una con del y en por",
    "Italian": "il gli di che nel della sul alla",
    "Portuguese": "os um uma com em da na ao",
    "Dutch": "het een van op met naar",
    "Swedish": "och på med ett av en som",
    "Polish": "na z się jest",
}
_ENGLISH_WORDS = frozenset(_ENGLISH.split())
_FOREIGN_WORDS = frozenset(word for words in _OTHERS.values() for word in words.split())
_FEWEST = 3  # foreign small words: fewer may be a name ("La Casa de las Flores" has two)


def is_english(caption: str) -> bool:
    """Whether at least half of the letters are Latin, and no other language's small words outweigh the English ones.

    A caption without letters passes: "2 + 2" needs no language.
    """
    if caption.isascii():
        latin = True
    else:
        letters = len(_LETTER.findall(caption))
        latin = 2 * len(_LATIN.findall(caption)) >= letters
    if not latin:
        return False
    foreign = english = 0
    for word in _SMALL.findall(caption.lower()):
        foreign += word in _FOREIGN_WORDS
        english += word in _ENGLISH_WORDS
    return foreign < _FEWEST or foreign <= english
