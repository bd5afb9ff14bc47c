"""Checkpoints without waiting for the disk: the state is copied to host memory, a thread writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from powerclip.errors import UserError
from powerclip.train import checkpoint

# A full disk may be cleared; one that fails again and again is no place for a run of days.
MOST_FAILURES = 3


class CheckpointWriter:
    """Writes checkpoints one after the other, in the background.

    A checkpoint that cannot be written is told to `warn` and the one before it stays; after `MOST_FAILURES` in a row
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
        """Begin to write the state of a step. What the caller does to its tensors from now on does not show."""
        self.wait()
        self._pending = step, self._pool.submit(checkpoint.write, self._folder, step, to_host(state), self._keep)

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
        if needed or self._failures >= MOST_FAILURES:
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
