"""Ctrl-C while shards are annotated: the first one lets those that have begun finish, the second one does not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType


class Stop:
    """Set by the first Ctrl-C; the second raises KeyboardInterrupt."""

    def __init__(self, say: Callable[[str], None] = print):
        self._say = say
        self._before: signal._HANDLER = None
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("stopping after the shards that have begun; Ctrl-C again to stop at once")
