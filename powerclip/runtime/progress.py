"""Progress of long work: a bar on a terminal, a line now and then elsewhere. Lines of text that go with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

T = TypeVar("T")

DAY = 86400.0
YEAR = 365.25 * DAY


class Progress:
    """Progress of `total` units of work, in a `with` block. `quiet` leaves only warnings.

        name ━━━━━━━━━━━━━━━  step 300/1200  loss 2.310  480 samples/s  eta 0:01:12

    Without a terminal the same is printed as a line. One bar is shown at a time: inside of another one, nothing is.

    How each part of the package uses it:

    - train: `unit="step"`, `every=0`; `skip(step)` where a run is resumed, `update(step)` after each step and
      `update(step, terms)` after those that are logged, each of which is a line in a log.
    - annotate: `unit="shards"`, `every=10`; `partial` is the share of the shards that have begun, the text says how
      many samples were done and how fast, and `skip(1)` leaves a shard that was done before out of the estimate.
    - compare's pool: `unit="runs"`, `transient=True`; `partial` is the sum over runs that have begun.
    - evaluate: `unit="images"`, `transient=True`; the total comes with each update.
    - reading and indexing shards, embedding batches: `track`, or `transient=True` and `advance`.

    Args:
        name: what is being done; stands in front.
        total: units of work; None where it is not known yet. May be set later.
        unit: what is counted.
        quiet: show nothing but warnings.
        console: where to; standard output by default.
        transient: remove the bar at the end.
        every: least seconds between two lines where there is no terminal; None prints no line there.
    """

    _shown: Progress | None = None  # the one whose bar is on the terminal

    def __init__(
        self,
        name: str,
        total: int | None = None,
        *,
        unit: str = "",
        quiet: bool = False,
        console: Console | None = None,
        transient: bool = False,
        every: float | None = None,
    ):
        self.console = console or Console()
        self.total = total
        self._name, self._unit, self._quiet, self._every = name, unit, quiet, every
        self._done, self._partial, self._skipped = 0, 0.0, 0
        self._text = ""
        self._began = time.monotonic()
        self._last_line = self._began
        self._bar: RichProgress | None = None
        if self.console.is_terminal and not quiet:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[text]}")
            self._bar = RichProgress(*columns, console=self.console, transient=transient)
            self._task = self._bar.add_task(escape(name), total=total, text="")

    def __enter__(self) -> Progress:
        self._began = self._last_line = time.monotonic()
        if self._bar and Progress._shown is None:
            Progress._shown = self
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar and Progress._shown is self:
            self._bar.stop()
            Progress._shown = None

    def skip(self, units: int) -> None:
        """Count units that took no time here: steps before a checkpoint, shards that were done already."""
        self._skipped += units

    def update(self, done: int, text: str | None = None, *, partial: float = 0.0, total: int | None = None) -> None:
        """Say how far the work is.

        Args:
            done: finished units, skipped ones included.
            text: what else to show until the next text; without a terminal only an update with a text prints a line.
            partial: units of work in what has begun and is not finished.
            total: the number of units, where it was not known before.
        """
        self._done, self._partial = done, partial
        self._text = self._text if text is None else text
        self.total = self.total if total is None else total
        if self._bar:
            self._bar.update(self._task, completed=done + partial, total=self.total, text=escape(self._described()))
        elif text is not None and self._every is not None and time.monotonic() - self._last_line >= self._every:
            self._last_line = time.monotonic()
            self.say(f"{self._name}  {self._described()}")

    def advance(self) -> None:
        """One more unit is finished."""
        self.update(self._done + 1)

    def say(self, text: str) -> None:
        """Print a line of information."""
        if not self._quiet:
            print_line(self.console, text)

    def warn(self, text: str) -> None:
        """Print a warning, quiet or not."""
        print_line(self.console, f"warning: {text}", style="yellow")

    @property
    def elapsed(self) -> float:
        """Seconds since the `with` block was entered."""
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float | None:
        """Estimated seconds to the end; None as long as nothing was done, or where the total is not known."""
        worked = self._done + self._partial - self._skipped
        if self.total is None or worked <= 0:
            return None
        return max(0.0, self.elapsed * (self.total - self._done - self._partial) / worked)

    def _described(self) -> str:
        count = f"{self._done:,}" if self.total is None else f"{self._done:{len(f'{self.total:,}')},}/{self.total:,}"
        remaining = self.remaining
        parts = [f"{self._unit} {count}".strip(), self._text, "" if remaining is None else f"eta {duration(remaining)}"]
        return "  ".join(part for part in parts if part)


def track(
    items: Sequence[T], name: str, *, unit: str = "", quiet: bool = False, console: Console | None = None
) -> Iterator[T]:
    """The items, with a bar on a terminal that counts those that were done and goes away at the end."""
    with Progress(name, len(items), unit=unit, quiet=quiet, console=console, transient=True) as progress:
        for item in items:
            yield item
            progress.advance()


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: paths in brackets are no markup, numbers get no colours, long lines are not cut."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as a clock shows them, `0:01:12`; from two days on in words: `12.5 days`, `2.1 years`."""
    for name, unit in (("years", YEAR), ("days", DAY)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
