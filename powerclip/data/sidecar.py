"""Sidecars: the annotations of a shard, in parquet files beside its tar, and how they are read.

Beside `00012.tar` lie `00012.trees.parquet` and `00012.regions.parquet` (`00012.parquet` is img2dataset's own). They
are two files because they come from two runs, on different machines and perhaps at the same time. Rows are samples in
the order of the tar:

| file | column | |
|---|---|---|
| both | `key` string | the name of the sample's members up to the first dot |
| trees | `caption` list of uint64 | `content_hash` of each caption |
| | `spans` list of list of {start, end, label} | the phrases of each caption, in offsets of its characters |
| | `fallback` list of string | why a caption has a flat tree ("too long"); null for one that was parsed |
| regions | `picture` uint64 | `content_hash` of the image's file |
| | `masks` list of binary | over the whole image, see `powerclip.data.mask_codec` |
| | `fallback` string | why there is no mask ("image not readable"); null when the segmenter ran |

The file's own metadata, under `powerclip`, say the rest: version of the format, annotator, counts (`SidecarInfo`).
A row belongs to a caption or an image only when the hash agrees: one that was edited since is stale, never wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from powerclip.data.captions import content_hash
from powerclip.data.mask_codec import unpack_masks
from powerclip.data.trees import Span
from powerclip.errors import UserError

FORMAT = 1  # what this code writes, and the only version that it reads
METADATA = b"powerclip"

Kind = Literal["trees", "regions"]

_SPAN = pa.struct([("start", pa.uint32()), ("end", pa.uint32()), ("label", pa.string())])
SCHEMAS = {
    "trees": pa.schema(
        [
            ("key", pa.string()),
            ("caption", pa.list_(pa.uint64())),
            ("spans", pa.list_(pa.list_(_SPAN))),
            ("fallback", pa.list_(pa.string())),
        ]
    ),
    "regions": pa.schema(
        [
            ("key", pa.string()),
            ("picture", pa.uint64()),
            ("masks", pa.list_(pa.binary())),
            ("fallback", pa.string()),
        ]
    ),
}


class SidecarError(UserError):
    """A sidecar that cannot be used: torn, of another version, or no sidecar."""


class Miss(StrEnum):
    """Why a sidecar has nothing for a sample."""

    NO_ROW = "key without a row in the sidecar"
    STALE = "sidecar made for another caption or image"


@dataclass(frozen=True)
class Annotator:
    """Who made the annotations. Another name, version or option makes them stale."""

    name: str
    version: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class SidecarInfo:
    """What a sidecar says of itself; reading it does not read the rows."""

    kind: Kind
    annotator: Annotator
    shard: str  # name of the tar
    fingerprint: str  # size and time of the tar when it was annotated
    samples: int
    items: int  # captions, or masks
    phrases: int = 0  # of all captions
    fallbacks: dict[str, int] = field(default_factory=dict)  # flat trees, or images without masks, by reason
    left_out: dict[str, int] = field(default_factory=dict)  # samples of the tar that have no row, by reason
    damage: str | None = None  # what was wrong with the tar, when not all of it could be read
    format: int = FORMAT

    def to_json(self) -> str:
        """The text that is stored in the file; the same for the same content."""
        return json.dumps(asdict(self), sort_keys=True)


def sidecar_path(shard: str | Path, kind: Kind, folder: str | Path | None = None) -> Path:
    """Where the sidecar of a shard lies: beside it, or in `folder`."""
    name = PurePosixPath(str(shard)).name.removesuffix(".tar") + f".{kind}.parquet"
    return (Path(shard).parent if folder is None else Path(folder)) / name


def find_sidecars(shards: Iterable[str | Path], kind: Kind, folder: str | Path | None = None) -> bool:
    """Whether any of the shards has a sidecar of that kind."""
    return any(sidecar_path(shard, kind, folder).exists() for shard in shards)


def read_info(path: str | Path) -> SidecarInfo:
    """What the sidecar at `path` says of itself.

    Raises:
        SidecarError: it is torn, of another version, or no sidecar.
    """
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise SidecarError(f"sidecar {path} cannot be read: {_line(error)}; annotate its shard again") from None
    return _info(path, metadata)


class TreeSidecar:
    """The phrases of all captions of a shard."""

    def __init__(self, path: Path, info: SidecarInfo, table: pa.Table):
        self.path, self.info = path, info
        self._rows = _rows(table)
        captions = table["caption"].combine_chunks()
        self._first = _offsets(captions)
        self._hashes = captions.flatten().to_numpy(zero_copy_only=False)  # [captions]
        per_caption = table["spans"].combine_chunks().flatten()
        self._first_span = _offsets(per_caption)
        spans = per_caption.flatten()
        self._start = spans.field("start").to_numpy(zero_copy_only=False)  # [spans]
        self._end = spans.field("end").to_numpy(zero_copy_only=False)
        labels = spans.field("label").dictionary_encode()
        self._label = labels.indices.to_numpy(zero_copy_only=False)
        self._labels: list[str] = labels.dictionary.to_pylist()
        reasons = table["fallback"].combine_chunks().flatten().dictionary_encode()
        self._reason = reasons.indices.fill_null(-1).to_numpy(zero_copy_only=False)  # [captions]
        self._reasons: list[str] = reasons.dictionary.to_pylist()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    @property
    def keys(self) -> list[str]:
        """The samples, in the order of the tar."""
        return list(self._rows)

    def hashes(self, key: str) -> list[int]:
        """The hashes of a sample's captions when it was annotated."""
        row = self._rows[key]
        return self._hashes[self._first[row] : self._first[row + 1]].tolist()

    def spans(self, key: str, caption: str) -> tuple[Span, ...] | Miss:
        """The phrases of a caption; for `powerclip.data.trees.tree_from_spans`."""
        at = self._find(key, content_hash(caption))
        return at if isinstance(at, Miss) else self._spans(at)

    def fallback(self, key: str, caption: str) -> str | None:
        """Why the caption has a flat tree; None when it was parsed, or is not there."""
        at = self._find(key, content_hash(caption))
        return None if isinstance(at, Miss) or self._reason[at] < 0 else self._reasons[self._reason[at]]

    def _find(self, key: str, caption_hash: int) -> int | Miss:
        row = self._rows.get(key)
        if row is None:
            return Miss.NO_ROW
        for at in range(self._first[row], self._first[row + 1]):
            if self._hashes[at] == caption_hash:
                return at
        return Miss.STALE

    def _spans(self, at: int) -> tuple[Span, ...]:
        rows = slice(self._first_span[at], self._first_span[at + 1])
        columns = self._start[rows].tolist(), self._end[rows].tolist(), self._label[rows].tolist()
        return tuple(Span(start, end, self._labels[label]) for start, end, label in zip(*columns, strict=True))


class RegionSidecar:
    """The masks of all images of a shard, packed until they are asked for."""

    def __init__(self, path: Path, info: SidecarInfo, table: pa.Table):
        self.path, self.info = path, info
        self._rows = _rows(table)
        self._images = table["picture"].to_numpy()
        masks = table["masks"].combine_chunks()
        self._first = _offsets(masks)
        self._masks = masks.flatten()
        self._reasons: list[str | None] = table["fallback"].to_pylist()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    @property
    def keys(self) -> list[str]:
        """The samples, in the order of the tar."""
        return list(self._rows)

    def masks(self, key: str, image: bytes | None = None) -> npt.NDArray[np.bool_] | Miss:
        """The masks of an image [masks, GRID, GRID]: cell (0, 0) is its top left corner, whatever its shape.

        With the image's file as it is now, masks of another image are a `Miss`.
        """
        packed = self.packed(key, image)
        return packed if isinstance(packed, Miss) else unpack_masks(packed)

    def packed(self, key: str, image: bytes | int | None = None) -> list[bytes] | Miss:
        """The masks of an image as they are stored, for those who need only some.

        Of the image's file as it is now, the `content_hash` will do.
        """
        row = self._rows.get(key)
        if row is None:
            return Miss.NO_ROW
        now = content_hash(image) if isinstance(image, bytes) else image
        if now is not None and self._images[row] != now:
            return Miss.STALE
        first, end = int(self._first[row]), int(self._first[row + 1])
        return self._masks.slice(first, end - first).to_pylist()

    def fallback(self, key: str) -> str | None:
        """Why an image has no mask; None when it has some, or is not there."""
        row = self._rows.get(key)
        return None if row is None else self._reasons[row]


def read_trees(path: str | Path) -> TreeSidecar:
    """The trees of a shard.

    Raises:
        SidecarError: the file is torn, of another version, or no sidecar of trees.
    """
    return TreeSidecar(Path(path), *_read(path, "trees"))


def read_regions(path: str | Path) -> RegionSidecar:
    """The masks of a shard.

    Raises:
        SidecarError: the file is torn, of another version, or no sidecar of regions.
    """
    return RegionSidecar(Path(path), *_read(path, "regions"))


def _read(path: str | Path, kind: Kind) -> tuple[SidecarInfo, pa.Table]:
    info = read_info(path)
    if info.kind != kind:
        raise SidecarError(f"sidecar {path} holds {info.kind}, not {kind}")
    try:
        table = pq.read_table(path, use_threads=False, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise SidecarError(f"sidecar {path} cannot be read: {_line(error)}; annotate its shard again") from None
    if not table.schema.equals(SCHEMAS[kind]):
        raise SidecarError(f"sidecar {path} has other columns than format {FORMAT}; annotate its shard again")
    return info, table


def _info(path: str | Path, metadata: Mapping[bytes, bytes]) -> SidecarInfo:
    if METADATA not in metadata:
        raise SidecarError(f"{path} is no sidecar: it was not written by `powerclip annotate`")
    try:
        fields = json.loads(metadata[METADATA])
        version = fields["format"]
        if version == FORMAT:
            return SidecarInfo(**{**fields, "annotator": Annotator(**fields["annotator"])})
    except (ValueError, KeyError, TypeError) as error:
        raise SidecarError(f"sidecar {path} has unreadable metadata ({error}); annotate its shard again") from None
    raise SidecarError(
        f"sidecar {path} has format {version}, this powerclip reads format {FORMAT}; annotate its shard again"
    )


def _rows(table: pa.Table) -> dict[str, int]:
    return {key: row for row, key in enumerate(table["key"].to_pylist())}


def _offsets(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """Where each list begins among the elements of all, `flatten`ed."""
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
