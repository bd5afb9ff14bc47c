"""Write a file as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, content: bytes) -> None:
    """Put `content` at `path` by renaming a finished file: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        # A full disk does not say which file it was.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
