"""What one sees while shards are annotated: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from powerclip.annotate.pipeline import Outcome, State

_SELDOM = 10.0  # seconds between two lines where there is no terminal


class Progress:
    """Reports one run over shards, each as far as it is. `quiet` leaves nothing."""

    def __init__(self, kind: str, shards: int, *, quiet: bool, console: Console | None = None):
        self.console = console or Console()
        self._kind, self._shards, self._quiet = kind, shards, quiet
        self._finished = 0  # shards
        self._skipped = 0  # of these, done already: they took no time
        self._known = 0  # samples of finished shards
        self._done = 0  # samples that were worked on
        self._partial: dict[str, tuple[int, int]] = {}  # shards that have begun: samples done, samples in all
        self._began = self._last = time.monotonic()
        self._bar: RichProgress | None = None
        if self.console.is_terminal and not quiet:
            self._bar = RichProgress(
                TextColumn("{task.description:8}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self._shard_task = self._bar.add_task("shards", total=max(1, shards), text="")
            self._sample_task = self._bar.add_task("samples", total=None, text="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def samples(self, shard: str, done: int, of: int) -> None:
        """Samples of a shard were annotated."""
        before = self._partial.get(shard, (0, of))[0]
        self._partial[shard] = before + done, of
        self._done += done
        self._show()

    def finished(self, outcome: Outcome) -> None:
        """A shard has come to its end."""
        reported, _ = self._partial.pop(outcome.shard, (0, 0))
        self._finished += 1
        self._known += outcome.samples
        if outcome.state in (State.NEW, State.REDONE):
            self._done += outcome.samples - reported
        else:
            self._skipped += 1
            self._done -= reported
        self._show()

    def say(self, text: str) -> None:
        """A line of information."""
        if not self._quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def rate(self) -> float:
        """Samples a second since the start."""
        return self._done / max(1e-9, time.monotonic() - self._began)

    def left(self) -> float | None:
        """Seconds to the end if it goes on like this; None while nothing has been done."""
        part = sum(done / max(1, of) for done, of in self._partial.values())
        worked = self._finished - self._skipped + part
        if worked <= 0:
            return None
        return (time.monotonic() - self._began) * (self._shards - self._finished - part) / worked

    def _show(self) -> None:
        shards = f"{self._finished:,}/{self._shards:,}"
        left = self.left()
        pace = f"{self.rate():,.0f}/s" + ("" if left is None else f"  eta {_clock(left)}")
        if self._bar:
            part = sum(done / max(1, of) for done, of in self._partial.values())
            here = self._known + sum(done for done, _ in self._partial.values())
            seen = self._known + sum(of for _, of in self._partial.values())
            # Shards are of one size, but for the last: those that were seen tell how many samples there will be.
            total = seen * self._shards / max(1, self._finished + len(self._partial))
            self._bar.update(self._shard_task, completed=self._finished + part, text=shards)
            self._bar.update(self._sample_task, completed=here, total=max(1.0, total), text=f"{here:,}  {pace}")
        elif not self._quiet and time.monotonic() - self._last > _SELDOM:
            self._last = time.monotonic()
            self.say(f"{self._kind}  shards {shards}  samples {self._done:,}  {pace}")


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
