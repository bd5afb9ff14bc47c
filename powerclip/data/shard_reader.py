"""Open shards: the bytes of a sample by its number, and the sidecars beside them. Only a few are open at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from powerclip.data.faults import BadSample, Fault
from powerclip.data.shards import ShardSet
from powerclip.data.sidecar import (
    RegionSidecar,
    SidecarError,
    SidecarInfo,
    TreeSidecar,
    read_regions,
    read_trees,
    sidecar_path,
)
from powerclip.data.tar_index import Extent, TarIndex, load_index
from powerclip.errors import UserError

S = TypeVar("S")


@dataclass(frozen=True)
class NoSidecar:
    """Why a shard has no annotations that can be used."""

    fault: Fault
    detail: str


@dataclass(frozen=True)
class OpenShard:
    """A tar with its index and its sidecars. A sidecar is None where it is not wanted."""

    path: Path
    file: int  # descriptor
    index: TarIndex
    trees: TreeSidecar | NoSidecar | None
    regions: RegionSidecar | NoSidecar | None

    def read(self, extent: Extent) -> bytes:
        """Bytes of the tar.

        Raises:
            BadSample: they are not there any more.
        """
        try:
            data = os.pread(self.file, extent.size, extent.offset)
        except OSError as error:
            raise BadSample(Fault.LOST, f"the tar cannot be read ({error.strerror})") from None
        if len(data) < extent.size:
            raise BadSample(Fault.LOST, "the tar has become shorter since it was indexed")
        return data

    def is_as_annotated(self, sidecar: SidecarInfo) -> bool:
        """Whether the tar has the size and time that it had when the sidecar was made."""
        return sidecar.fingerprint == f"{self.index.info.size}:{self.index.info.mtime_ns}"

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)


class ShardReader:
    """Opens shards on demand and closes the least recently used ones.

    Args:
        shards: the tars.
        sidecars: where the sidecars lie, when not beside the tars.
        trees, regions: which sidecars are wanted.
        keep: how many shards stay open.
    """

    def __init__(
        self, shards: ShardSet, sidecars: Path | None = None, *, trees: bool, regions: bool, keep: int = 16
    ) -> None:
        self._shards, self._sidecars = shards, sidecars
        self._trees, self._regions, self._keep = trees, regions, keep
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict()}  # descriptors mean nothing to another process

    def path(self, number: int) -> Path:
        """Where the shard of that number lies."""
        return self._shards.paths[number]

    def open(self, number: int) -> OpenShard:
        """The shard of that number.

        Raises:
            BadSample: it cannot be opened any more.
            UserError: it was exchanged for another since the run began.
        """
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self._open[number] = self._make(number)
        if len(self._open) > self._keep:
            self._open.popitem(last=False)[1].close()
        return shard

    def close(self) -> None:
        """Close all that is open."""
        while self._open:
            self._open.popitem()[1].close()

    def _make(self, number: int) -> OpenShard:
        path = self.path(number)
        try:
            index = load_index(path, self._shards.folder)
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise BadSample(Fault.LOST, f"the tar cannot be opened ({error.strerror})") from None
        if len(index) != self._shards.counts[number]:
            os.close(file)
            raise UserError(
                f"shard {path} had {self._shards.counts[number]:,} samples when the run began and now has "
                f"{len(index):,}; leave shards as they are while a run reads them"
            )
        trees, regions = sidecar_path(path, "trees", self._sidecars), sidecar_path(path, "regions", self._sidecars)
        return OpenShard(
            path=path,
            file=file,
            index=index,
            trees=_sidecar(trees, read_trees, Fault.TREES_MISSING, Fault.TREES_UNUSABLE) if self._trees else None,
            regions=_sidecar(regions, read_regions, Fault.REGIONS_MISSING, Fault.REGIONS_UNUSABLE)
            if self._regions
            else None,
        )


def _sidecar(path: Path, read: Callable[[Path], S], missing: Fault, unusable: Fault) -> S | NoSidecar:
    if not path.exists():
        return NoSidecar(missing, f"no sidecar {path}")
    try:
        return read(path)
    except SidecarError as error:
        return NoSidecar(unusable, str(error))
