"""Where the samples of a tar lie: found once by reading its headers, kept in a small file, then one seek and one read.

The index of `00012.tar` is `00012.tar.index`: a line of JSON (what the tar looked like, how many samples) and the
arrays of `TarIndex` as they are in memory. It is used while size and time of the tar agree, and made anew otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from powerclip.data.captions import CAPTION_SUFFIXES, IMAGE_SUFFIXES, number_captions, split_member
from powerclip.data.paths import user_cache
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic

FORMAT = 1
_BLOCK = 512
_PAGE = 4096  # what a read fetches at least, whatever is asked for: small members come with their header

# Why a tar cannot be used, or not all of it.
EMPTY = "empty file"
NO_TAR = "not a tar"
COMPRESSED = "compressed: unpack it first, as with gunzip"
TORN = "cut off"
# gzip, bzip2, xz, zstd: members of a compressed tar cannot be read where they lie.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")

NO_IMAGE = "no image"
NO_CAPTION = "no caption"


class Extent(NamedTuple):
    """Bytes of a tar."""

    offset: int
    size: int


@dataclass(frozen=True)
class IndexInfo:
    """What an index says of its tar; reading it does not read the index."""

    size: int  # of the tar
    mtime_ns: int
    samples: int
    left_out: dict[str, int] = field(default_factory=dict)  # samples that cannot be used, by reason
    damage: str | None = None  # what is wrong with the tar, when not all of it could be read
    format: int = FORMAT

    def fits(self, tar: Path) -> bool:
        """Whether the tar still looks the same."""
        now = os.stat(tar)
        return self.format == FORMAT and (self.size, self.mtime_ns) == (now.st_size, now.st_mtime_ns)


@dataclass(frozen=True)
class TarIndex:
    """The samples of a tar that have an image and a caption, by number.

    A sample may have its captions in two files (`.json` and `.txt`); the second is looked at when the first has none.
    """

    info: IndexInfo
    keys: list[str]
    images: npt.NDArray[np.int64]  # [samples, 2] offset and size
    captions: npt.NDArray[np.int64]  # [samples, 2 files, 2]; size 0: no such file
    kinds: npt.NDArray[np.uint8]  # [samples, 2 files] place in CAPTION_SUFFIXES

    def __len__(self) -> int:
        return len(self.keys)

    def image(self, number: int) -> Extent:
        """Where the image of a sample lies."""
        return Extent(*self.images[number].tolist())

    def caption_files(self, number: int) -> list[tuple[Extent, str]]:
        """Where the captions of a sample lie, with the suffix of each file."""
        rows = zip(self.captions[number].tolist(), self.kinds[number].tolist(), strict=True)
        return [(Extent(*row), CAPTION_SUFFIXES[kind]) for row, kind in rows if row[1]]

    def to_bytes(self) -> bytes:
        """The content of an index file."""
        keys = "\n".join(self.keys).encode("utf-8", errors="surrogateescape")
        head = json.dumps({**asdict(self.info), "keys": len(keys)}).encode() + b"\n"
        return b"".join([head, self.images.tobytes(), self.captions.tobytes(), self.kinds.tobytes(), keys])


def sample_captions(file: int, index: TarIndex, number: int) -> list[tuple[int, str]]:
    """The captions of a sample in an open tar, with their numbers: those of its first file that has any."""
    for extent, suffix in index.caption_files(number):
        captions = number_captions(os.pread(file, extent.size, extent.offset), suffix)
        if captions:
            return captions
    return []


# ---- the file that keeps an index ------------------------------------------------------------------------------------


def index_path(tar: Path, folder: Path | None = None) -> Path:
    """Where the index of a tar is kept: beside it, or in `folder`."""
    return (tar.parent if folder is None else folder) / f"{tar.name}.index"


def candidate_paths(tar: Path, folder: Path | None = None) -> list[Path]:
    """Where an index may lie, the preferred one first: `folder`, beside the tar, in the user's cache."""
    cached = user_cache("index") / _flat_name(tar)
    return [*([index_path(tar, folder)] if folder else []), index_path(tar), cached]


def find_info(tar: Path, folder: Path | None = None) -> tuple[IndexInfo, Path] | None:
    """What the index of a tar says, and where it lies; None when there is none that fits the tar as it is."""
    for path in candidate_paths(tar, folder):
        try:
            with open(path, "rb") as file:
                info = _parse_head(file.readline())[0]
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if info.fits(tar):
            return info, path
    return None


def read_index(path: Path) -> TarIndex:
    """The index in a file.

    Raises:
        ValueError: it is torn or no index.
    """
    head, _, data = path.read_bytes().partition(b"\n")
    try:
        info, key_bytes = _parse_head(head)
        count = info.samples
        sizes = [16 * count, 32 * count, 2 * count, key_bytes]
        if len(data) != sum(sizes):
            raise ValueError(f"{len(data)} bytes instead of {sum(sizes)}")
        ends = np.cumsum([0, *sizes]).tolist()
        images, captions, kinds, keys = (data[start:end] for start, end in pairwise(ends))
        names = keys.decode("utf-8", errors="surrogateescape").split("\n") if count else []
        if len(names) != count:
            raise ValueError(f"{len(names)} keys instead of {count}")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no index: {error}") from None
    return TarIndex(
        info=info,
        keys=names,
        images=np.frombuffer(images, np.int64).reshape(count, 2),
        captions=np.frombuffer(captions, np.int64).reshape(count, 2, 2),
        kinds=np.frombuffer(kinds, np.uint8).reshape(count, 2),
    )


def load_index(tar: Path, folder: Path | None = None) -> TarIndex:
    """The index of a tar: the one that was kept, or a new one, which is then kept.

    Raises:
        OSError: the tar cannot be opened.
        UserError: a new index can be kept nowhere.
    """
    stored = find_info(tar, folder)
    if stored is not None:
        try:
            return read_index(stored[1])
        except (OSError, ValueError):
            pass  # torn by a crash of the machine: made again
    index = make_index(tar)
    keep_index(index, tar, folder)
    return index


def keep_index(index: TarIndex, tar: Path, folder: Path | None = None) -> Path:
    """Write an index to the first place that can be written.

    Raises:
        UserError: there is none.
    """
    content = index.to_bytes()
    tried = candidate_paths(tar, folder)
    for path in tried:
        try:
            write_atomic(path, content)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            return path
    raise UserError(
        f"the index of {tar} cannot be kept in {', '.join(str(path.parent) for path in tried)} ({problem}); "
        "set data.sidecars to a folder that can be written"
    )


def _flat_name(tar: Path) -> str:
    """A file name for a path: the cache holds the indices of many folders."""
    import hashlib

    return f"{tar.stem}-{hashlib.blake2b(os.fsencode(tar.resolve()), digest_size=8).hexdigest()}.index"


def _parse_head(line: bytes) -> tuple[IndexInfo, int]:
    fields = json.loads(line)
    key_bytes = int(fields.pop("keys"))
    return IndexInfo(**fields), key_bytes


# ---- reading a tar's headers -----------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A file of a tar, whose bytes begin at `offset`."""

    name: str
    offset: int
    size: int


class TarDamage(Exception):
    """A file that is no tar, or a tar that breaks off; the members before that are good."""


def iter_members(tar: Path) -> Iterator[Member]:
    """The plain files of a tar, in order. Only headers are read.

    Understood: ustar, the long names of GNU tar, the names and sizes of pax; a tar must not be compressed.

    Raises:
        OSError: the tar cannot be opened.
        TarDamage: it breaks off, is empty, compressed or no tar at all.
    """
    fd = os.open(tar, os.O_RDONLY)
    try:
        yield from _members(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def make_index(tar: Path) -> TarIndex:
    """Read the headers of a tar. What is wrong with it is said in `TarIndex.info`, never raised.

    Raises:
        OSError: the tar cannot be opened.
    """
    status = os.stat(tar)
    samples = _Samples()
    damage = None
    try:
        for member in iter_members(tar):
            samples.add(member)
    except TarDamage as error:
        damage = str(error)
        # Members of a sample lie together: the last one may lack what the cut took.
        samples.forget_last()
    return samples.finish(status, damage)


class _Samples:
    """Members in the order of a tar, gathered into samples: those that lie together and share a key."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._images: list[Extent] = []
        self._captions: list[tuple[Extent, Extent]] = []
        self._kinds: list[tuple[int, int]] = []
        self._left_out: dict[str, int] = {}
        self._key: str | None = None
        self._image = Extent(0, 0)
        self._texts: list[tuple[Extent, int]] = []

    def add(self, member: Member) -> None:
        key, suffix = split_member(member.name)
        if key != self._key:
            self._close()
            self._key, self._image, self._texts = key, Extent(0, 0), []
        if suffix in IMAGE_SUFFIXES:
            self._image = Extent(member.offset, member.size)
        elif suffix in CAPTION_SUFFIXES and member.size:
            self._texts.append((Extent(member.offset, member.size), CAPTION_SUFFIXES.index(suffix)))

    def forget_last(self) -> None:
        self._key = None

    def finish(self, status: os.stat_result, damage: str | None) -> TarIndex:
        self._close()
        info = IndexInfo(status.st_size, status.st_mtime_ns, len(self._keys), self._left_out, damage)
        return TarIndex(
            info=info,
            keys=self._keys,
            images=np.array(self._images, np.int64).reshape(-1, 2),
            captions=np.array(self._captions, np.int64).reshape(-1, 2, 2),
            kinds=np.array(self._kinds, np.uint8).reshape(-1, 2),
        )

    def _close(self) -> None:
        if self._key is None:
            return
        if not self._image.size or not self._texts:
            reason = NO_CAPTION if self._image.size else NO_IMAGE
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
            return
        (first, first_kind), (second, second_kind) = [*self._texts, (Extent(0, 0), 0)][:2]
        self._keys.append(self._key)
        self._images.append(self._image)
        self._captions.append((first, second))
        self._kinds.append((first_kind, second_kind))


def _members(fd: int, size: int) -> Iterator[Member]:
    """`iter_members` of an open file of `size` bytes."""
    if size == 0:
        raise TarDamage(EMPTY)
    window, window_at = b"", 0
    at = 0
    long_name: str | None = None
    long_size: int | None = None
    while True:
        if not window_at <= at <= window_at + len(window) - _BLOCK:
            window, window_at = os.pread(fd, _PAGE, at), at
        header = window[at - window_at : at - window_at + _BLOCK]
        if at == 0 and header.startswith(_COMPRESSED) and not _checks(header):
            raise TarDamage(COMPRESSED)
        if len(header) < _BLOCK:
            raise TarDamage(TORN)
        if not any(header):
            return  # two blocks of zeros end a tar; tools that write one only are read as well
        if not _checks(header):
            raise TarDamage(NO_TAR if at == 0 else TORN)
        length = long_size if long_size is not None else _number(header[124:136])
        data, at = at + _BLOCK, at + _BLOCK + -(-length // _BLOCK) * _BLOCK
        if data + length > size:
            raise TarDamage(TORN)
        kind = header[156:157]
        if kind == b"L":
            long_name = _text(os.pread(fd, length, data))
        elif kind == b"x":
            records = _pax_records(os.pread(fd, length, data))
            long_name = records.get("path", long_name)
            long_size = int(records["size"]) if records.get("size", "").isdecimal() else None
        elif kind in b"gK":
            pass  # settings for the whole tar, and the target of a link
        else:
            if kind in (b"0", b"\0", b"7"):
                yield Member(long_name or _name(header), data, length)
            long_name = long_size = None


def _checks(header: bytes) -> bool:
    """Whether the sum of a header's bytes is what it says; its own field counts as spaces."""
    try:
        stated = _number(header[148:156])
    except TarDamage:
        return False
    return stated == sum(header) - sum(header[148:156]) + 8 * 32


def _number(field_: bytes) -> int:
    """A number as tars write it: octal digits, or binary when the first bit is set (8 GB and more)."""
    if field_[0] & 0x80:
        return int.from_bytes(bytes([field_[0] & 0x7F]) + field_[1:], "big")
    try:
        return int(field_.strip(b"\0 ") or b"0", 8)
    except ValueError:
        raise TarDamage(TORN) from None


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", errors="surrogateescape")


def _pax_records(data: bytes) -> dict[str, str]:
    """Lines of `length key=value`, the length in bytes counting itself and the line's end."""
    records = {}
    while data:
        digits, _, _ = data.partition(b" ")
        if not digits.isdigit() or not len(digits) + 1 < int(digits) <= len(data):
            break
        line, data = data[len(digits) + 1 : int(digits) - 1], data[int(digits) :]
        key, _, value = line.partition(b"=")
        records[_text(key)] = value.decode("utf-8", errors="surrogateescape")
    return records
