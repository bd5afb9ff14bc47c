"""Shards behind URLs, read through a cache: counted by their indices, fetched ahead in the order of the stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from powerclip.data.remote import RemoteCache, RemoteFile, describe, sidecar_url
from powerclip.data.samples import Samples
from powerclip.data.shard_order import StreamOrder
from powerclip.data.shards import ShardSet, count_shards
from powerclip.data.tar_index import IndexInfo, index_path, load_index, read_index
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress

_REQUESTS = 8  # to a store at a time


@dataclass(frozen=True)
class RemoteShards(ShardSet):
    """Shards whose copies come and go; `paths` are those of the copies."""

    cache: RemoteCache = field(default_factory=lambda: RemoteCache(Path(), 0))
    sidecars: str | None = None  # the URL of the folder of sidecars, when not beside the shards
    regions: bool = False  # whether masks are fetched with a shard

    def open(self, number: int) -> Samples:
        """The samples of a shard, which is fetched if its copy is not there.

        Raises:
            OSError: it cannot be opened.
            UserError: it cannot be fetched, or was exchanged for another.
        """
        path = self.fetch(number)
        try:
            return super().open(number)
        except FileNotFoundError:  # removed in between, for another process that needed room
            self.cache.get(path)
            return super().open(number)

    def fetch(self, number: int) -> Path:
        """The copy of a shard, with the masks that belong to it."""
        path = self.cache.get(self.paths[number])
        if self.regions:
            masks = path.with_name(f"{path.stem}.regions.parquet")
            url = sidecar_url(self.cache.files[str(path)].url, ".regions.parquet", self.sidecars)
            if not masks.exists():
                with suppress(OSError):  # counted where it is missing
                    self.cache.get_small(url, masks)
        return path

    @contextmanager
    def ahead(self, order: StreamOrder, start: int, stop: int) -> Iterator[Prefetch]:
        """Fetch the shards of the window that is read, and of the next one, while the stream goes on."""
        prefetch = Prefetch(self, order, start, stop)
        try:
            yield prefetch
        finally:
            prefetch.close()


class Prefetch:
    """A thread that fetches shards before they are needed. What fails is fetched again by who needs it."""

    def __init__(self, shards: RemoteShards, order: StreamOrder, start: int, stop: int):
        self._shards, self._windows = shards, order.windows(start, stop)
        self._position = start
        self._moved, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def reached(self, position: int) -> None:
        """The stream has come to this position."""
        with self._moved:
            self._position = position
            self._moved.notify()

    def close(self) -> None:
        """Fetch no further shard."""
        with self._moved:
            self._closed = True
            self._moved.notify()
        self._thread.join()

    def _run(self) -> None:
        previous = -1  # where the window before begins
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for start, members in self._windows:
                if not self._wait_for(previous):  # at most one window more than the one that is read
                    return
                list(pool.map(self._fetch, members))
                previous = start

    def _wait_for(self, position: int) -> bool:
        """Whether the stream came to a position before it was closed."""
        with self._moved:
            self._moved.wait_for(lambda: self._closed or self._position >= position)
            return not self._closed

    def _fetch(self, number: int) -> None:
        if not self._closed:
            with suppress(UserError):
                self._shards.fetch(number)


def open_remote(
    urls: Sequence[str],
    cache_folder: Path,
    limit: int,
    *,
    folder: Path | None = None,
    sidecars: str | None = None,
    trees: bool = False,
    regions: bool = False,
    strict: bool = False,
    max_bad: float = 1.0,
    progress: bool = False,
) -> RemoteShards:
    """Count the samples of remote shards, from the indices beside them; those that have none are fetched and read.

    Args:
        urls: the tars.
        cache_folder: where copies go.
        limit: bytes that they may take.
        folder: where indices and sidecars lie on this machine, when not with the copies.
        sidecars: the URL of a folder of sidecars and indices, when they are not beside the tars.
        trees, regions: which sidecars are fetched: those of trees now, of regions with each shard.
        strict, max_bad, progress: as in `open_shards`.

    Raises:
        UserError: a store does not answer, too much is damaged, or nothing can be used.
    """
    bar = Progress("asking for shards", len(urls), unit="shards", quiet=not progress, transient=True)

    def ask(url: str) -> RemoteFile | None:
        try:
            return describe(url)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{url} cannot be read: {error}") from None

    def prepare(file: RemoteFile | None) -> IndexInfo | None:
        if file is None:
            return None
        try:
            info = _remote_index(file, cache, folder, sidecars)
            path = cache.path(file.url)
            if trees and folder is None:
                cache.get_small(
                    sidecar_url(file.url, ".trees.parquet", sidecars), path.with_name(f"{path.stem}.trees.parquet")
                )
        except OSError as error:
            raise UserError(f"what belongs to {file.url} cannot be fetched: {error}") from None
        bar.advance()
        return info

    with bar, ThreadPoolExecutor(_REQUESTS) as pool:
        files = list(pool.map(ask, urls))
        cache = RemoteCache(cache_folder, limit, [file for file in files if file is not None])
        infos = list(pool.map(prepare, files))
    counted = count_shards([Path(url) for url in urls], infos, folder, strict=strict, max_bad=max_bad)
    return RemoteShards(
        paths=[cache.path(url) for url in urls],
        counts=counted.counts,
        folder=folder,
        damage=counted.damage,
        left_out=counted.left_out,
        cache=cache,
        sidecars=sidecars,
        regions=regions and folder is None,
    )


def _remote_index(file: RemoteFile, cache: RemoteCache, folder: Path | None, sidecars: str | None) -> IndexInfo:
    """The index of a shard: the one that was kept here, the one beside it, or one that is made of a copy of it."""
    path = cache.path(file.url)
    kept = index_path(path, folder)
    with suppress(OSError, ValueError):
        info = read_index(kept).info
        if (info.size, info.mtime_ns) == (file.size, file.mtime_ns):
            return info
    beside = path.with_name(f".{path.name}.index.remote")
    if cache.get_small(sidecar_url(file.url, ".tar.index", sidecars), beside):
        with suppress(ValueError):
            index = read_index(beside)
            if index.info.size == file.size:
                index = replace(index, info=replace(index.info, mtime_ns=file.mtime_ns))
                write_atomic(kept, index.to_bytes())
                return index.info
    return load_index(cache.get(path), folder).info
