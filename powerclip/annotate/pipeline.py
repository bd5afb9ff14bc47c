"""One shard, from its tar to its sidecar: what is there is kept, what is stale or missing is annotated.

A shard is done when its sidecar says so: made by the same annotator (name, version, options) from a tar of the same
size and time. When the tar has changed, rows whose caption or image has not are taken over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

from powerclip.annotate.sources import OpenSource, Sources
from powerclip.annotate.writer import RegionRows, TreeRows, write_sidecar
from powerclip.data.sidecar import (
    Annotator,
    Kind,
    RegionSidecar,
    SidecarError,
    SidecarInfo,
    TreeSidecar,
    read_info,
    sidecar_path,
)
from powerclip.errors import UserError
from powerclip.runtime.locks import exclusive

# Samples that were annotated since the last call, and samples of the shard.
OnProgress = Callable[[int, int], None]
OnSamples = Callable[[str, int, int], None]  # the same, after the name of the shard


class State(StrEnum):
    """What became of a shard."""

    DONE = "done already"
    NEW = "annotated"
    REDONE = "annotated again"
    FAILED = "failed"


@dataclass(frozen=True)
class ShardResult:
    """What one shard gave."""

    shard: str
    state: State
    samples: int = 0
    kept: int = 0  # of these, samples that were taken over from the sidecar before
    items: int = 0  # captions or masks
    fallbacks: dict[str, int] = field(default_factory=dict)
    reason: str | None = None  # why it was annotated again, or failed
    damage: str | None = None  # what was wrong with a tar of which a part could be read
    bytes: int = 0


Rows = TypeVar("Rows", TreeRows, RegionRows)
Old = TypeVar("Old", TreeSidecar, RegionSidecar)


class ShardAnnotator(ABC, Generic[Rows, Old]):
    """Annotates shards, one after another, with a model that is loaded once."""

    kind: Kind
    batch: int  # samples at a time

    def __init__(self, annotator: Annotator, sidecars: Path | None, sources: Sources | None = None):
        self.annotator, self.sidecars, self.sources = annotator, sidecars, sources or Sources()

    @abstractmethod
    def read_old(self, path: Path) -> Old:
        """The existing sidecar."""

    @abstractmethod
    def new_rows(self) -> Rows:
        """No rows yet."""

    @abstractmethod
    def fill(self, rows: Rows, source: OpenSource, count: int, old: Old | None) -> Iterator[tuple[int, int]]:
        """Append the rows of all samples in order; gives, as it goes, how many, and how many of them are from `old`."""

    def batches(self, count: int) -> Iterator[range]:
        """The numbers of the samples of each batch."""
        return (range(first, min(first + self.batch, count)) for first in range(0, count, self.batch))

    @abstractmethod
    def summarise(self, rows: Rows) -> tuple[int, int, Counter[str]]:
        """Captions or masks, phrases, and fallbacks by reason."""

    def annotate(self, shard: str, on_progress: OnProgress = lambda done, total: None) -> ShardResult:
        """Bring the sidecar of a shard up to date. A tar that cannot be read is a result, not an exception.

        Another process that annotates the same shard is waited for: nothing is done twice.
        """
        path = sidecar_path(shard, self.kind, self.sidecars)
        try:
            shard_fingerprint = self.sources.fingerprint(shard, self.kind)
            info, reason = self._existing(path, shard_fingerprint)
            if info is not None and reason is None:
                return _done(shard, info, path)
            with exclusive(path.with_name(f".{path.name}.lock")):
                info, reason = self._existing(path, shard_fingerprint)
                if info is not None and reason is None:
                    return _done(shard, info, path)
                with self.sources.open(shard) as source:
                    return self._annotate(shard, source, path, shard_fingerprint, info, reason, on_progress)
        except OSError as error:
            return ShardResult(shard, State.FAILED, reason=_because(error))

    def _existing(self, path: Path, shard_fingerprint: str) -> tuple[SidecarInfo | None, str | None]:
        """The sidecar at `path`, if its rows can be taken over, and why it has to be written again, if so."""
        if not path.exists():
            return None, None
        try:
            info = read_info(path)
        except SidecarError:
            return None, "sidecar torn or of another format"
        if info.annotator != self.annotator:
            return None, f"made by {info.annotator}"
        return info, None if info.fingerprint == shard_fingerprint else "tar changed"

    def _annotate(
        self,
        shard: str,
        source: OpenSource,
        path: Path,
        shard_fingerprint: str,
        info: SidecarInfo | None,
        reason: str | None,
        on_progress: OnProgress,
    ) -> ShardResult:
        count = len(source.samples.keys)
        if not count:
            left_out = ", ".join(f"{number:,} samples with {why}" for why, number in source.left_out.items())
            return ShardResult(shard, State.FAILED, reason=source.damage or left_out or "no samples")
        old = None
        if info is not None:
            try:
                old = self.read_old(path)
            except SidecarError:
                reason = "sidecar torn or of another format"
        rows, kept = self.new_rows(), 0
        for added, taken in self.fill(rows, source, count, old):
            kept += taken
            on_progress(added, count)
        items, phrases, fallbacks = self.summarise(rows)
        new_info = SidecarInfo(
            kind=self.kind,
            annotator=self.annotator,
            shard=PurePosixPath(shard).name,
            fingerprint=shard_fingerprint,
            samples=count,
            items=items,
            phrases=phrases,
            fallbacks=dict(sorted(fallbacks.items())),
            left_out=dict(sorted(source.left_out.items())),
            damage=source.damage,
        )
        try:
            size = write_sidecar(path, new_info, rows)
        except OSError as error:
            raise UserError(f"sidecar {path} cannot be written: {_because(error)}; --sidecars names a folder") from None
        unchanged = kept == count == (len(old) if old is not None else -1)
        state = State.NEW if reason is None else State.DONE if unchanged else State.REDONE
        return ShardResult(shard, state, count, kept, items, new_info.fallbacks, reason, new_info.damage, size)


def _done(shard: str, info: SidecarInfo, path: Path) -> ShardResult:
    size = path.stat().st_size
    return ShardResult(
        shard, State.DONE, info.samples, info.samples, info.items, info.fallbacks, damage=info.damage, bytes=size
    )


def _because(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    return error.strerror or str(error) or type(error).__name__
