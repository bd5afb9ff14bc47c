"""What is annotated: a tar, here or behind a URL, or a part of a table; its samples, and what changes when it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from powerclip.annotate.shard_list import fingerprint, local_copy
from powerclip.data.columns import Columns
from powerclip.data.faults import BadSample, Fault
from powerclip.data.remote import RemoteCache
from powerclip.data.samples import Samples, TarSamples
from powerclip.data.sidecar import Kind
from powerclip.data.table import Table
from powerclip.data.table_parts import PartSamples, is_part, read_part
from powerclip.data.tar_index import make_index


@dataclass(frozen=True)
class OpenSource:
    """The samples of a shard, and what is wrong with it."""

    samples: Samples
    left_out: dict[str, int] = field(default_factory=dict)
    damage: str | None = None

    def captions(self, number: int) -> list[str]:
        """The captions of a sample; none where there are none that are text.

        Raises:
            OSError: the shard cannot be read any more.
        """
        try:
            return self.samples.captions(number)
        except BadSample as bad:
            if bad.fault is Fault.LOST:
                raise OSError(bad.detail) from None
            return []

    def image(self, number: int) -> bytes:
        """The file of an image; nothing where there is none.

        Raises:
            OSError: the shard cannot be read any more.
        """
        try:
            return self.samples.image(number)
        except BadSample as bad:
            if bad.fault is Fault.LOST:
                raise OSError(bad.detail) from None
            return b""


@dataclass
class Sources:
    """Opens shards by name. A table is read once, for all of its parts."""

    columns: Columns = field(default_factory=Columns)
    cache: RemoteCache | None = None  # where copies of remote shards are, by whose paths these are then named
    _tables: dict[Path, Table] = field(default_factory=dict)

    def fingerprint(self, shard: str, kind: Kind) -> str:
        """What changes when the captions (trees) or the images (regions) of a shard do.

        Raises:
            OSError: there is no such shard, or its store does not answer.
        """
        if self.cache is not None and shard in self.cache.files:
            return self.cache.files[shard].fingerprint
        if not is_part(shard):
            return fingerprint(shard)
        part = read_part(shard, self._tables, self.columns)
        return part.fingerprint() if kind == "trees" else _images_fingerprint(part)

    @contextmanager
    def open(self, shard: str) -> Iterator[OpenSource]:
        """The samples of a shard.

        Raises:
            OSError: it cannot be read.
        """
        if is_part(shard):
            yield OpenSource(PartSamples(read_part(shard, self._tables, self.columns)))
            return
        if self.cache is not None and shard in self.cache.files:
            self.cache.get(Path(shard))
        with local_copy(shard) as tar:
            index = make_index(tar)
            samples = TarSamples(tar, index)
            try:
                yield OpenSource(samples, index.info.left_out, index.info.damage)
            finally:
                samples.close()


def _images_fingerprint(part: Table) -> str:
    digest = blake2b(digest_size=16)
    for number in range(len(part)):
        path = part.file(number)
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}:{status.st_mtime_ns}\n".encode("utf-8", errors="surrogateescape"))
    return f"images:{digest.hexdigest()}"
