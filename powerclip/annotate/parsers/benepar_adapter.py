"""The Berkeley neural parser in a spaCy pipeline: a chart parser over T5 features. Accurate and slow."""

from __future__ import annotations

from typing import Any

from powerclip.annotate.parsers.library import LibraryParser
from powerclip.data.trees import Span
from powerclip.errors import UserError

_UNUSED = ["ner", "lemmatizer", "attribute_ruler", "textcat"]  # of spaCy's pipeline: constituents need none of them


class BeneparParser(LibraryParser):
    """spaCy's words and sentences, benepar's constituents.

    Args:
        device: `cpu`, `cuda`, …
        model: of benepar: `benepar_en3`, `benepar_en3_large`, or a path.
        spacy_model: that cuts captions into words and sentences.

    Raises:
        UserError: benepar, spaCy or a model is not installed.
    """

    name = "benepar"

    def __init__(self, device: str = "cpu", model: str = "benepar_en3", spacy_model: str = "en_core_web_md") -> None:
        try:
            import benepar
            import spacy
        except ImportError as error:
            raise UserError(
                f"the parser benepar needs its libraries ({error}): pip install 'powerclip[benepar]'"
            ) from error
        try:
            self._pipeline = spacy.load(spacy_model, exclude=_UNUSED)
        except OSError as error:
            raise UserError(f"spaCy has no model {spacy_model!r}: python -m spacy download {spacy_model}") from error
        try:
            component = self._pipeline.add_pipe("benepar", config={"model": model, "disable_tagger": True})
        except LookupError as error:
            command = f"import benepar; benepar.download('{model}')"
            raise UserError(f'benepar has no model {model!r}: python -c "{command}"') from error
        component._parser.to(device)  # by itself it goes to any GPU that is there
        self.version = f"{getattr(benepar, '__version__', '0')}-{model}-{spacy_model}"

    def documents(self, texts: list[str]) -> list[Any]:
        """spaCy's documents."""
        return list(self._pipeline.pipe(texts))

    def phrases(self, document: Any) -> list[Span]:
        """The phrases of a document; of two sentences, both."""
        return document_spans(document)


def document_spans(document: Any) -> list[Span]:
    """The phrases of a spaCy document that benepar has read.

    A constituent's labels are those of its unary chain, the highest first; a word that is no phrase has none.
    """
    return [
        Span(constituent.start_char, constituent.end_char, constituent._.labels[-1])
        for sentence in document.sents
        for constituent in sentence._.constituents
        if constituent._.labels
    ]
