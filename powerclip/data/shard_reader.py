"""Open shards: their samples by number, and the sidecars beside them. Only a few are open at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from powerclip.data.faults import BadSample, Fault
from powerclip.data.samples import Samples
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

S = TypeVar("S")


@dataclass(frozen=True)
class NoSidecar:
    """Why a shard has no annotations that can be used."""

    fault: Fault
    detail: str


@dataclass(frozen=True)
class OpenShard:
    """The samples of a shard, and its sidecars. A sidecar is None where it is not wanted."""

    path: Path
    samples: Samples
    trees: TreeSidecar | NoSidecar | None
    regions: RegionSidecar | NoSidecar | None
    fingerprint: str

    def is_as_annotated(self, sidecar: SidecarInfo) -> bool:
        """Whether the shard is as it was when the sidecar was made."""
        return sidecar.fingerprint == self.fingerprint


class ShardReader:
    """Opens shards on demand and closes the least recently used ones.

    Args:
        shards: the tars.
        sidecars: where the sidecars lie, when not beside the tars.
        trees, regions: which sidecars are wanted.
        tree_folder: where those of trees lie, when not with the others.
        keep: how many shards stay open.
    """

    def __init__(
        self,
        shards: ShardSet,
        sidecars: Path | None = None,
        *,
        trees: bool,
        regions: bool,
        tree_folder: Path | None = None,
        keep: int = 16,
    ) -> None:
        self._shards, self._sidecars, self._tree_folder = shards, sidecars, tree_folder or sidecars
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
            self._open.popitem(last=False)[1].samples.close()
        return shard

    def close(self) -> None:
        """Close all that is open."""
        while self._open:
            self._open.popitem()[1].samples.close()

    def _make(self, number: int) -> OpenShard:
        path = self.path(number)
        try:
            samples = self._shards.open(number)
        except OSError as error:
            raise BadSample(Fault.LOST, f"the tar cannot be opened ({error.strerror})") from None
        trees, regions = sidecar_path(path, "trees", self._tree_folder), sidecar_path(path, "regions", self._sidecars)
        return OpenShard(
            path=path,
            samples=samples,
            trees=_sidecar(trees, read_trees, Fault.TREES_MISSING, Fault.TREES_UNUSABLE) if self._trees else None,
            regions=_sidecar(regions, read_regions, Fault.REGIONS_MISSING, Fault.REGIONS_UNUSABLE)
            if self._regions
            else None,
            fingerprint=samples.fingerprint if self._regions else "",
        )


def _sidecar(path: Path, read: Callable[[Path], S], missing: Fault, unusable: Fault) -> S | NoSidecar:
    if not path.exists():
        return NoSidecar(missing, f"no sidecar {path}")
    try:
        return read(path)
    except SidecarError as error:
        return NoSidecar(unusable, str(error))
