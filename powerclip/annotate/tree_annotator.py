"""The trees of a shard: its captions through a parser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from powerclip.annotate.parsers import Parsed, Parser
from powerclip.annotate.pipeline import ShardAnnotator
from powerclip.annotate.sources import OpenSource, Sources
from powerclip.annotate.writer import TreeRows
from powerclip.data.captions import content_hash
from powerclip.data.sidecar import Annotator, Miss, TreeSidecar, read_trees


class TreeAnnotator(ShardAnnotator[TreeRows, TreeSidecar]):
    """Gives every caption its tree."""

    kind = "trees"
    batch = 512

    def __init__(self, parser: Parser, sidecars: Path | None = None, sources: Sources | None = None):
        super().__init__(Annotator(parser.name, parser.version), sidecars, sources)
        self._parser = parser

    def read_old(self, path: Path) -> TreeSidecar:
        """The trees of the existing sidecar."""
        return read_trees(path)

    def new_rows(self) -> TreeRows:
        """No rows yet."""
        return TreeRows()

    def fill(
        self, rows: TreeRows, source: OpenSource, count: int, old: TreeSidecar | None
    ) -> Iterator[tuple[int, int]]:
        """Parse the captions, but for those whose trees are known."""
        for numbers in self.batches(count):
            yield len(numbers), self._add(rows, source, numbers, old)

    def _add(self, rows: TreeRows, source: OpenSource, numbers: Sequence[int], old: TreeSidecar | None) -> int:
        """Parse the captions of some samples; gives how many of these were known."""
        captions, keys = [source.captions(number) for number in numbers], source.samples.keys
        known: dict[tuple[int, str], Parsed] = {}
        if old is not None:
            for number, texts in zip(numbers, captions, strict=True):
                for caption in texts:
                    spans = old.spans(keys[number], caption)
                    if not isinstance(spans, Miss):
                        reason = old.fallback(keys[number], caption)
                        known[number, caption] = Parsed(spans, reason)  # type: ignore[arg-type]
        missing = [
            (number, caption)
            for number, texts in zip(numbers, captions, strict=True)
            for caption in texts
            if (number, caption) not in known
        ]
        parsed = self._parser.parse([caption for _, caption in missing])
        trees = known | dict(zip(missing, parsed, strict=True))
        for number, texts in zip(numbers, captions, strict=True):
            rows.key.append(keys[number])
            rows.caption.append([content_hash(caption) for caption in texts])
            rows.spans.append([trees[number, caption].spans for caption in texts])
            rows.fallback.append([trees[number, caption].fallback for caption in texts])
        if old is None:
            return 0
        appended = zip(rows.key[-len(numbers) :], rows.caption[-len(numbers) :], strict=True)
        return sum(key in old and old.hashes(key) == hashes for key, hashes in appended)

    def summarise(self, rows: TreeRows) -> tuple[int, int, Counter[str]]:
        """Captions, their phrases, and flat trees by reason."""
        fallbacks = Counter(reason for sample in rows.fallback for reason in sample if reason is not None)
        phrases = sum(len(caption) for sample in rows.spans for caption in sample)
        return sum(map(len, rows.caption)), phrases, fallbacks
