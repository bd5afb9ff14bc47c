"""Tokens of a Hugging Face tokenizer with the characters of the raw caption that each stands for."""

from __future__ import annotations

from typing import Any

from powerclip.data.cleaning import align
from powerclip.data.trees import is_word
from powerclip.errors import UserError


class FastOffsets:
    """The offsets of a fast tokenizer in open_clip's wrapper (`HFTokenizer`), taken through open_clip's cleaning.

    Args:
        wrapper: open_clip's `HFTokenizer`.
        context_length: most tokens of a caption.

    Raises:
        UserError: the tokenizer is a slow one, which has no offsets, or rearranges its tokens.
    """

    def __init__(self, wrapper: Any, context_length: int) -> None:
        self._wrapper, self._tokenizer, self._context_length = wrapper, wrapper.tokenizer, context_length
        if not getattr(self._tokenizer, "is_fast", False):
            raise UserError(
                f"words need a tokenizer with character offsets, and {type(self._tokenizer).__name__} has none: use a "
                "fast one (a folder with tokenizer.json)"
            )
        if wrapper.tokenizer_mode:
            raise UserError(f"text_cfg.tokenizer_mode {wrapper.tokenizer_mode!r} moves tokens: words have no offsets")
        self.pad_id: int = 0 if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        self.name: str = str(self._tokenizer.name_or_path)

    def encode(self, caption: str) -> tuple[list[int], list[tuple[int, int]], list[bool]]:
        """Ids, as the wrapper gives them; the characters of each; and which of them are words."""
        text = self._wrapper.clean_fn(caption)
        encoded = self._tokenizer(
            text,
            max_length=self._context_length,
            truncation=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        ids, special = list(encoded["input_ids"]), [bool(flag) for flag in encoded["special_tokens_mask"]]
        if self._wrapper.strip_sep_token:
            ids = [0 if number == self._tokenizer.sep_token_id else number for number in ids]
        raw = None if text == caption else align(text, caption, len(text))
        spans: list[tuple[int, int]] = []
        words: list[bool] = []
        for (start, end), extra in zip(encoded["offset_mapping"], special, strict=True):
            if extra or start >= end:
                at = spans[-1][1] if spans else 0
                spans.append((at, at))
                words.append(False)
                continue
            word = is_word(text[start:end])
            if raw is not None:
                start, end = raw[start][0], raw[end - 1][1]
            spans.append(_without_edges(caption, start, end) if word else (start, end))
            words.append(word and is_word(caption[start:end]))
        return ids, spans, words


def _without_edges(caption: str, start: int, end: int) -> tuple[int, int]:
    """A span without the spaces and marks at its edges that cleaning or a word's own token swallowed."""
    first, last = start, end
    while first < last and not is_word(caption[first]):
        first += 1
    while last > first and not is_word(caption[last - 1]):
        last -= 1
    return (first, last) if first < last else (start, end)
