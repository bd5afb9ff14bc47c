"""One process at a time: a lock on a file, which the system takes back when its holder dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process is in here with the same `path`; the file is made, and removed at the end.

    On a file system without locks there is none: what is done inside must be right without it, only not twice.
    """
    file = _acquire(path)
    try:
        yield
    finally:
        if file is not None:
            # Removed before it is released: whoever waits for this file then finds that it is gone, and makes another.
            path.unlink(missing_ok=True)
            os.close(file)


def _acquire(path: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except OSError:
            os.close(file)
            return None
        os.close(file)
