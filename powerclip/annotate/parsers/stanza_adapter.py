"""Stanza's constituency parser: a shift-reduce parser over large pretrained features. Accurate and slow."""

from __future__ import annotations

from typing import Any

from powerclip.annotate.parsers.library import LibraryParser
from powerclip.data.trees import Span
from powerclip.errors import UserError

_PROCESSORS = "tokenize,mwt,pos,constituency"


class StanzaParser(LibraryParser):
    """Stanza's English pipeline up to its constituency trees.

    Args:
        device: `cpu`, `cuda`, …
        package: of stanza's models: `default`, `default_fast`, `default_accurate`.
        model_dir: where the models lie; stanza's own folder by default.

    Raises:
        UserError: stanza or its models are not installed.
    """

    name = "stanza"

    def __init__(self, device: str = "cpu", package: str = "default", model_dir: str | None = None) -> None:
        try:
            import stanza
        except ImportError as error:
            raise UserError(
                f"the parser stanza needs its library ({error}): pip install 'powerclip[stanza]'"
            ) from error
        where = {} if model_dir is None else {"dir": str(model_dir)}
        try:
            self._pipeline = stanza.Pipeline(
                "en",
                processors=_PROCESSORS,
                package=package,
                device=device,
                download_method=None,  # no download that the user did not ask for, nor one by each worker
                logging_level="ERROR",
                **where,
            )
        except Exception as error:  # stanza has many kinds for "not there"
            folder = "" if model_dir is None else f", model_dir={str(model_dir)!r}"
            command = f"stanza.download('en', processors='{_PROCESSORS}', package={package!r}{folder})"
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(
                f'stanza has no models for the package {package!r} ({reason}): python -c "import stanza; {command}"'
            ) from error
        self.version = f"{stanza.__version__}-{package}"

    def documents(self, texts: list[str]) -> list[Any]:
        """Stanza's documents."""
        return self._pipeline.bulk_process(texts)

    def phrases(self, document: Any) -> list[Span]:
        """The phrases of a document; of two sentences, both."""
        return [span for sentence in document.sentences for span in sentence_spans(sentence)]


def sentence_spans(sentence: Any) -> list[Span]:
    """The phrases of a stanza sentence: its tree's leaves are its words, in order, and the words know their offsets."""
    word_spans = [_word_span(word) for word in sentence.words]
    spans: list[Span] = []
    position = 0

    def walk(node: Any) -> None:
        nonlocal position
        if not node.children:
            position += 1
            return
        first, slot = position, len(spans)
        for child in node.children:
            walk(child)
        preterminal = len(node.children) == 1 and not node.children[0].children
        if not preterminal:
            # Before what is inside: of a unary chain the lowest label comes last, and stays.
            spans.insert(slot, Span(word_spans[first][0], word_spans[position - 1][1], str(node.label).split("-")[0]))

    walk(sentence.constituency)
    return spans


def _word_span(word: Any) -> tuple[int, int]:
    """A word's offsets; a part of a multi-word token that has none of its own gets the token's."""
    if word.start_char is None:
        return word.parent.start_char, word.parent.end_char
    return word.start_char, word.end_char
