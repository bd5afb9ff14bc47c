"""Locks between processes: one that waits for its turn, and one on a folder that refuses a second process.

The kernel keeps a lock (flock) for as long as the process lives, however it ends, and network file systems pass it
between hosts. The file itself proves nothing: one that a killed process left behind is simply locked again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from powerclip.errors import UserError

LOCK_FILE = ".lock"

# What file systems without flock answer.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process is in here with the same `path`; the file is made, and removed at the end.

    Where files cannot be made or locked there is no lock: what is done inside must be right without it, only not twice.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(path, fcntl.LOCK_EX)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        # Removed before it is released: whoever waits for this file then finds that it is gone, and makes another.
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path, operation: int) -> int:
    """Open a file, made where it does not exist, and flock it; the descriptor holds the lock."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, operation)
        except BaseException:
            os.close(handle)
            raise
        # Another process may have removed the file between our opening and locking it: then the lock is on nothing.
        if _is_same(handle, path):
            return handle
        os.close(handle)


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


# ---- folders ---------------------------------------------------------------------------------------------------------


# A forked child, such as a loader's worker, shares the lock and would hold it beyond its parent's death.
_held: set[int] = set()


def _forget_in_child() -> None:
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class FolderLock:
    """The lock on a folder, which is made where it does not exist, and removed again if it is left empty.

    Args:
        folder: what to lock.
        warn: called with a line where the file system has no locks; then nothing is locked.

    Raises:
        UserError: another process holds it.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None] | None = None):
        self.path = folder / LOCK_FILE
        self._made = _make(folder)
        try:
            self._handle = self._acquire(warn)
        except BaseException:
            self._remove_made()
            raise
        _held.add(self._handle)

    def _acquire(self, warn: Callable[[str], None] | None) -> int:
        try:
            handle = _lock(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(
                    f"{self.path.parent} is in use by {_read_holder(self.path)}: wait for it to end, stop it, or "
                    "choose another --output folder"
                ) from None
            if error.errno not in UNSUPPORTED:
                raise
            if warn:
                warn(f"{self.path.parent}: no locks on this file system; a second run there would not be noticed")
            return os.open(self.path, os.O_RDWR)
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode(), 0)
        return handle

    def release(self) -> None:
        """Give the lock back; what is left of the folder is as if it had never been there."""
        self.path.unlink(missing_ok=True)
        _held.discard(self._handle)
        os.close(self._handle)
        self._remove_made()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _remove_made(self) -> None:
        for folder in self._made:
            with suppress(OSError):  # something was written there
                folder.rmdir()


def _make(folder: Path) -> list[Path]:
    """Make a folder with its parents; gives what was made, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _read_holder(path: Path) -> str:
    """Who wrote the lock file, in words."""
    try:
        holder = json.loads(path.read_bytes())
        return f"process {int(holder['process'])} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
