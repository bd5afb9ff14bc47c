"""Signals of a scheduler: SIGUSR1 requests a checkpoint, SIGTERM a checkpoint and the end of the run."""

from __future__ import annotations

import enum
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# sysexits.h's EX_TEMPFAIL, "try again": the run is unfinished and nothing is wrong with it.
EXIT_PREEMPTED = 75


class StopRequest(enum.IntEnum):
    """What is requested; the larger value wins."""

    NOTHING = 0
    CHECKPOINT = 1
    STOP = 2


class Preempted(Exception):
    """A run was stopped by a signal; its state is in its newest checkpoint."""


class Signals:
    """Handles signals while the `with` block runs, and restores the previous handlers after it.

    A second SIGTERM is not held back: it ends the process. `minutes` after the last checkpoint another one is due.
    """

    def __init__(self, minutes: float | None = None):
        self._minutes = minutes
        self._since = time.monotonic()
        self._request = StopRequest.NOTHING
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._since = time.monotonic()
        # Only the main thread may set handlers; a run in another thread is stopped by its caller.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
            signal.signal(signal.SIGTERM, self._on_term)
            signal.signal(signal.SIGUSR1, self._on_user)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def request(self) -> StopRequest:
        """The current request: what signals requested, or a checkpoint that is due by the clock."""
        late = self._minutes is not None and time.monotonic() - self._since >= 60 * self._minutes
        return max(self._request, StopRequest.CHECKPOINT if late else StopRequest.NOTHING)

    def written(self) -> None:
        """Note that a checkpoint was written: the request is served, and the clock starts again."""
        self._since = time.monotonic()
        if self._request is StopRequest.CHECKPOINT:
            self._request = StopRequest.NOTHING

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._request = StopRequest.STOP
        signal.signal(signal.SIGTERM, self._before.get(signal.SIGTERM) or signal.SIG_DFL)

    def _on_user(self, number: int, frame: FrameType | None) -> None:
        self._request = max(self._request, StopRequest.CHECKPOINT)
