"""Checkpoint files: written in the background, all or nothing; verified when read; the last few kept.

A checkpoint is one `torch.save` archive of plain values and tensors, so that reading it can run no code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerclip.errors import UserError
from powerclip.runtime.checkpoint_file import FORMAT, VERSION, BadCheckpoint, checkpoint_path, checkpoints, read
from powerclip.runtime.distributed import SINGLE, Ranks

# A full disk may be cleared in time; after so many failures in a row the run stops.
MAX_FAILURES = 3


def write(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write the state of a step and drop all but the last `keep` checkpoints.

    The file gets its name only once its bytes are on the disk: a process that is killed meanwhile leaves the
    previous checkpoint as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(folder, step)
    unfinished = folder / f".{path.name}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(folder)
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def newest(
    folder: Path, warn: Callable[[str], None], ranks: Ranks = SINGLE, *, required: bool = True
) -> dict[str, Any] | None:
    """The newest good state in a folder, or None when it holds no checkpoint.

    The main rank looks for it, the others read the same. A bad file is reported to `warn` and renamed to `….refused`,
    so that it is neither read again nor counted among those that are kept. When there are checkpoints and none is
    good: None, or a UserError when one is `required`.
    """
    states: list[dict[str, Any] | None] = []  # of the main rank, which alone calls `find`

    def find() -> int | None:
        states.append(_newest(folder, warn, required=required))
        return None if states[0] is None else states[0]["step"]

    step = ranks.broadcast(find)
    if step is None or ranks.is_main:
        return states[0] if states else None
    return read(checkpoint_path(folder, step))


def _newest(folder: Path, warn: Callable[[str], None], *, required: bool) -> dict[str, Any] | None:
    for leftover in folder.glob(".step-*.unfinished"):
        leftover.unlink(missing_ok=True)
    refused: list[tuple[Path, BadCheckpoint]] = []
    for path in reversed(checkpoints(folder)):
        try:
            state = read(path)
        except BadCheckpoint as error:
            refused.append((path, error))
            continue
        for bad, reason in refused:
            _refuse(bad)
            warn(f"{reason}; going back to {path.name}")
        return state
    if refused and not required:
        for bad, reason in refused:
            _refuse(bad)
            warn(f"{reason}; no good checkpoint is left, starting from the first step")
        return None
    if refused:
        more = f" (and {len(refused) - 1} older, bad as well)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0][1]}{more}; no good checkpoint is left: start again with --overwrite")
    return None


def _refuse(path: Path) -> None:
    path.rename(path.with_name(path.name + ".refused"))


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk: without it a rename may not survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckpointWriter:
    """Writes checkpoints one after the other, in the background.

    When a checkpoint cannot be written, `warn` is called and the one before it stays; after `MAX_FAILURES` in a row
    the run stops with a UserError.
    """

    def __init__(self, folder: Path, keep: int, warn: Callable[[str], None]):
        self._folder, self._keep, self._warn = folder, keep, warn
        # A future can be waited for again after Ctrl-C in the wait. A thread cannot: Python 3.11 takes it for ended,
        # and a process that ends while torch writes a file aborts.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[Path]] | None = None
        self._failures = 0

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to write the state of a step. Its tensors are copied: the caller may change them afterwards."""
        self.wait()
        self._pending = step, self._pool.submit(write, self._folder, step, to_host(state), self._keep)

    def wait(self, *, needed: bool = False) -> None:
        """Return when the last checkpoint is on the disk; `needed` makes its failure an error at once."""
        if self._pending is None:
            return
        step, written = self._pending
        error = written.exception()
        self._pending = None
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        text = f"the checkpoint of step {step} could not be written to {self._folder} ({error})"
        if needed or self._failures >= MAX_FAILURES:
            times = f", the last {self._failures} neither" if self._failures > 1 else ""
            raise UserError(f"{text}{times}; make room there and continue with --resume") from error
        self._warn(f"{text}; the one before it stays")


def to_host(value: Any) -> Any:
    """A deep copy of nested plain values with every tensor in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_host(item) for item in value)
    return value
