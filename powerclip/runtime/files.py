"""Write a file or a folder as a whole or not at all."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` that takes its place when the block ends without an error.

    What was at `target` is replaced. An error or an interrupt removes the draft; a kill leaves it, hidden, until the
    next draft of the same folder on this machine.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    draft = _hidden(target, "partial")
    replaced = _hidden(target, "replaced")
    try:
        draft.mkdir()
        yield draft
        for path in sorted(draft.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if target.exists():
            target.rename(replaced)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _hidden(target: Path, kind: str) -> Path:
    """A name beside `target` that says whose it is: the machine's and the process's."""
    return target.with_name(f".{target.name}.{platform.node()}.{os.getpid()}.{kind}")


def _remove_abandoned(target: Path) -> None:
    """Remove the drafts of `target` that processes of this machine left when they were killed."""
    prefix = f".{target.name}.{platform.node()}."
    for path in target.parent.iterdir():
        number, _, kind = path.name.removeprefix(prefix).partition(".")
        ours = path.name.startswith(prefix) and kind == "partial" and number.isdecimal()
        if ours and not _is_running(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
