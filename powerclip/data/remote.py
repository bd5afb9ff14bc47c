"""Files behind a URL (`s3://`, `gs://`, `https://`): fetched as a whole, again where a connection breaks, into a cache.

A fetched file is the same as a local one: its time is a function of what its store says of it, so that indices and
sidecars which were made for it stay good when it is removed and fetched again. The cache has a size: what was opened
longest ago goes first. Whoever has a file open keeps it. Several processes share a cache, and none fetches what another
one is fetching.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from powerclip.errors import UserError, first_line
from powerclip.runtime.locks import exclusive

_CHUNK = 16 * 2**20  # bytes of a request
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
# Protocol → what reads it, and the extra that brings it.
_EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"), "https": ("aiohttp", "http")}


def is_url(name: str) -> bool:
    """Whether a file lies behind a protocol (`s3://…`) instead of in the file system."""
    return "://" in name


@dataclass(frozen=True)
class RemoteFile:
    """A file as its store describes it."""

    url: str
    size: int
    tag: str  # what changes when the file does: an ETag, or a time

    @property
    def mtime_ns(self) -> int:
        """The time that a copy of it gets."""
        digest = blake2b(f"{self.url}\0{self.size}\0{self.tag}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") % 2**30) * 10**9

    @property
    def fingerprint(self) -> str:
        """What changes when the file does."""
        return f"{self.size}:{self.tag}"


def describe(url: str) -> RemoteFile:
    """What the store says of a file.

    Raises:
        FileNotFoundError: there is none.
        OSError: the store does not answer.
    """
    info: Mapping[str, Any] = _attempt(url, lambda system, path: system.info(path))
    tag = next((info[name] for name in ("ETag", "etag", "LastModified", "mtime", "created") if info.get(name)), "")
    if info.get("size") is None:
        raise OSError(f"{url}: its server does not say how large it is")
    return RemoteFile(url, int(info["size"]), str(tag))


def fetch(file: RemoteFile, target: Path) -> None:
    """Copy a file to `target`, which appears when it is whole; what was fetched before an interruption is kept.

    Raises:
        OSError: it cannot be fetched, after several attempts.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Under a name that belongs to this version of the file: what is left of another one is not continued.
    partial_path = target.with_name(f".{target.name}.{file.mtime_ns // 10**9:08x}.partial")
    done = partial_path.stat().st_size if partial_path.exists() else 0
    with partial_path.open("ab") as output:
        while done < file.size:
            wanted = min(_CHUNK, file.size - done)
            data = _attempt(file.url, partial(_read, start=done, count=wanted, size=file.size))
            output.write(data)
            done += len(data)
    if done != file.size:
        partial_path.unlink()
        raise OSError(f"{done:,} bytes came instead of {file.size:,}")
    os.utime(partial_path, ns=(time.time_ns(), file.mtime_ns))
    partial_path.replace(target)


def expand_urls(line: str, setting: str) -> list[str]:
    """The URLs that a line with braces and patterns names, in order.

    Raises:
        UserError: a brace is not closed, nothing matches, or the store cannot be asked.
    """
    from braceexpand import braceexpand

    try:
        spelled = list(braceexpand(line))
    except ValueError:  # its UnbalancedBracesError
        raise UserError(f"{setting}: {line}: a brace is not closed (write {{00000..00099}}.tar)") from None
    urls = []
    for url in spelled:
        if not any(sign in url for sign in "*?["):
            urls.append(url)
            continue
        try:
            matches = _attempt(url, lambda system, path: [system.unstrip_protocol(one) for one in system.glob(path)])
        except OSError as error:
            raise UserError(f"{setting}: {url} cannot be listed: {error}") from None
        if not matches:
            raise UserError(f"{setting}: nothing matches {url}")
        urls += sorted(matches)
    return urls


class RemoteCache:
    """Copies of remote files in a folder, of at most so many bytes.

    Args:
        folder: of the copies; below it, a folder for each one of the store's.
        limit: bytes that shards may take; the small files that belong to them are not counted.
        files: those that may be asked for.
    """

    def __init__(self, folder: Path, limit: int, files: Iterable[RemoteFile] = ()):
        self.folder, self.limit = folder, limit
        self.files = {str(self.path(file.url)): file for file in files}

    def path(self, url: str) -> Path:
        """Where the copy of a URL lies, or would."""
        parent, _, name = url.rpartition("/")
        return self.folder / blake2b(parent.encode(), digest_size=6).hexdigest() / name.partition("?")[0]

    def get(self, path: Path) -> Path:
        """The copy at `path`, fetched if it is not there.

        Raises:
            UserError: it cannot be fetched.
        """
        file = self.files[str(path)]
        if self._is_there(path, file):
            return path
        with exclusive(path.with_name(f".{path.name}.lock")):
            if self._is_there(path, file):
                return path
            self._make_room(file)
            try:
                fetch(file, path)
            except OSError as error:
                raise UserError(f"{file.url} cannot be fetched: {_line(error)}; --resume continues a run") from None
            # Others may have fetched meanwhile into the room that was made.
            self._make_room(file, there=path)
        return path

    def get_small(self, url: str, path: Path) -> bool:
        """Copy a file that belongs to a shard to `path`, if there is one and the copy is not the same already.

        Raises:
            OSError: its store does not answer.
        """
        try:
            file = describe(url)
        except FileNotFoundError:
            return False
        with exclusive(path.with_name(f".{path.name}.lock")):
            if not self._is_there(path, file):
                fetch(file, path)
        return True

    def _is_there(self, path: Path, file: RemoteFile) -> bool:
        try:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                return False
            os.utime(path, ns=(time.time_ns(), file.mtime_ns))  # when it was used last
        except OSError:
            return False
        return True

    def _make_room(self, new: RemoteFile, there: Path | None = None) -> None:
        """Remove the copies that were used longest ago until `new`, which may be `there` already, fits."""
        with exclusive(self.folder / ".room.lock"):
            self._remove_oldest(new, there)

    def _remove_oldest(self, new: RemoteFile, there: Path | None) -> None:
        if new.size > self.limit:
            raise UserError(f"data.cache_size is {self.limit / 1e9:g} GB, but {new.url} alone has {new.size / 1e9:.2f}")
        copies = []
        for path in self.folder.glob("*/*.tar"):
            if path == there:
                continue
            with suppress(FileNotFoundError):  # another process has just removed it
                status = path.stat()
                copies.append((status.st_atime_ns, status.st_size, path))
        room = self.limit - new.size - sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if room >= 0:
                return
            path.unlink(missing_ok=True)
            path.with_name(f"{path.stem}.regions.parquet").unlink(missing_ok=True)
            room += size


# ---- stores ----------------------------------------------------------------------------------------------------------


def _read(system: Any, path: str, *, start: int, count: int, size: int) -> bytes:
    """Some bytes of a file."""
    data: bytes = system.cat_file(path, start=start, end=start + count)
    if len(data) == size != count:  # a server that gives the whole file, whatever is asked for
        data = data[start : start + count]
    if len(data) != count:
        raise OSError(f"the connection broke after {len(data):,} of {count:,} bytes")
    return data


def _attempt(url: str, ask: Any) -> Any:
    """What `ask` gets of the store of a URL; a few times, with longer and longer pauses.

    Raises:
        FileNotFoundError, PermissionError: which another attempt would not change.
        OSError: the last attempt failed as well.
    """
    for pause in (*PAUSES, None):
        try:
            with _store_errors():
                return ask(*file_system(url))
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            if pause is None:
                raise OSError(f"{_line(error)} (tried {len(PAUSES) + 1} times)") from None
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        UserError: what reads this protocol is not installed, or it is not known.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        needed, extra = _EXTRAS.get(url.partition("://")[0], ("", ""))
        advice = f"it needs {needed}: pip install 'powerclip[{extra}]'" if needed else first_line(error)
        raise UserError(f"{url} cannot be opened: {advice}") from None
    except ValueError as error:
        raise UserError(f"{url} cannot be opened: {first_line(error)}") from None
    return system, path


@contextmanager
def _store_errors() -> Iterator[None]:
    """Whatever a store's library raises, as an OSError."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {first_line(error)}") from error


def _line(error: OSError) -> str:
    return error.strerror or first_line(error)


def sidecar_url(url: str, suffix: str, folder: str | None = None) -> str:
    """Where what belongs to a shard lies: `s3://bucket/00012.trees.parquet` of `s3://bucket/00012.tar`."""
    parent, _, name = url.rpartition("/")
    return f"{(folder or parent).rstrip('/')}/{PurePosixPath(name).name.removesuffix('.tar')}{suffix}"
