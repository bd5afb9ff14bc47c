"""A lock on a folder: one process works in it at a time, and a process that dies holds nothing.

The kernel keeps the lock (flock) for as long as the process lives, however it ends, and network file systems pass it
between hosts. The file itself proves nothing: one that a killed process left behind is simply locked again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from powerclip.errors import UserError

LOCK_FILE = ".lock"

# What file systems without flock answer.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

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
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _read_holder(handle)
                os.close(handle)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UserError(
                        f"{self.path.parent} is in use by {holder}: wait for it to end, stop it, or choose another "
                        "--output folder"
                    ) from None
                if error.errno not in UNSUPPORTED:
                    raise
                if warn:
                    warn(f"{self.path.parent}: no locks on this file system; a second run there would not be noticed")
                return os.open(self.path, os.O_RDWR)
            # Another process may have removed the file between our opening and locking it: then the lock is on nothing.
            if _is_same(handle, self.path):
                break
            os.close(handle)
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


def _read_holder(handle: int) -> str:
    """Who wrote the lock file, in words."""
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(holder['process'])} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _is_same(handle: int, path: Path) -> bool:
    try:
        on_disk = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(handle)
    return (opened.st_ino, opened.st_dev) == (on_disk.st_ino, on_disk.st_dev)
