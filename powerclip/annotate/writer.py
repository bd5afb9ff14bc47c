"""Sidecars are written here: as a whole or not at all, and the same bytes for the same content."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from powerclip.data.sidecar import METADATA, SCHEMAS, SidecarInfo
from powerclip.data.trees import Span
from powerclip.runtime.files import write_atomic

_ABANDONED = 60.0  # seconds after which a half-written file belongs to a process that was killed


@dataclass
class TreeRows:
    """The rows of a sidecar of trees, column by column; captions and what belongs to them are in the same order."""

    key: list[str] = field(default_factory=list)
    caption: list[list[int]] = field(default_factory=list)
    spans: list[list[Sequence[Span]]] = field(default_factory=list)
    fallback: list[list[str | None]] = field(default_factory=list)

    def table(self) -> pa.Table:
        """The rows as they are stored."""
        spans = [
            [[{"start": span.start, "end": span.end, "label": span.label} for span in caption] for caption in sample]
            for sample in self.spans
        ]
        columns = [_storable(self.key), self.caption, spans, self.fallback]
        return pa.table(dict(zip(SCHEMAS["trees"].names, columns, strict=True)), schema=SCHEMAS["trees"])


@dataclass
class RegionRows:
    """The rows of a sidecar of regions, column by column; masks are packed."""

    key: list[str] = field(default_factory=list)
    image: list[int] = field(default_factory=list)
    masks: list[list[bytes]] = field(default_factory=list)
    fallback: list[str | None] = field(default_factory=list)

    def table(self) -> pa.Table:
        """The rows as they are stored."""
        columns = [_storable(self.key), self.image, self.masks, self.fallback]
        return pa.table(dict(zip(SCHEMAS["regions"].names, columns, strict=True)), schema=SCHEMAS["regions"])


def write_sidecar(path: Path, info: SidecarInfo, rows: TreeRows | RegionRows) -> int:
    """Write a sidecar in one step; gives its size in bytes."""
    table = rows.table().replace_schema_metadata({METADATA: info.to_json()})
    buffer = io.BytesIO()
    # Hashes and masks are noise to a compressor; labels and offsets repeat.
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=["spans.list.element.list.element.label", "fallback", "fallback.list.element"],
        write_statistics=False,
    )
    write_atomic(path, buffer.getvalue())
    return buffer.tell()


def remove_abandoned(folder: Path) -> int:
    """Remove what killed processes left half-written in a folder of sidecars; gives how many files."""
    removed = 0
    for partial in folder.glob(".*.parquet.*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > _ABANDONED:
                partial.unlink()
                removed += 1
        except FileNotFoundError:  # its writer has just finished
            pass
    return removed


def _storable(keys: Sequence[str]) -> list[str]:
    """Keys as parquet takes them: bytes of a file name that are no UTF-8 are lone surrogates, which it refuses."""
    return [key.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace") for key in keys]
