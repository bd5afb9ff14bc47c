"""What the person who started a run sees: a bar on a terminal, a tidy line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

# Shown beside the loss when the objective reports them; the rest is in metrics.jsonl and tensorboard.
SHOWN = ("clip", "alignment", "violation")


class Progress:
    """Reports one run. `quiet` leaves only warnings."""

    def __init__(self, name: str, total: int, *, quiet: bool, console: Console | None = None):
        self.console = console or Console()
        self._name, self._quiet = name, quiet
        self.total = total  # steps of the run; may still change before the first one
        self._start = 0
        self._began = time.perf_counter()
        self._bar: RichProgress | None = None
        if self.console.is_terminal and not quiet:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[terms]}"),
                console=self.console,
            )
            self._task = self._bar.add_task(escape(name), total=total, terms="")

    def after(self, step: int) -> Progress:
        """The same, for a run that begins after `step`."""
        self._start = step
        if self._bar:
            self._bar.update(self._task, completed=step, total=self.total)
        return self

    def __enter__(self) -> Progress:
        self._began = time.perf_counter()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """A step is done; `values` when it was logged."""
        if self._bar:
            self._bar.update(self._task, completed=step)
            if values is not None:
                self._bar.update(self._task, terms=escape(self._terms(step, values)))
        elif values is not None and not self._quiet:
            width = len(str(self.total))
            self.say(f"{self._name}  step {step:{width}d}/{self.total}  {self._terms(step, values)}")

    def say(self, text: str) -> None:
        """A line of information."""
        if not self._quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that must be seen, quiet or not."""
        self.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _terms(self, step: int, values: Mapping[str, float]) -> str:
        shown = [f"{name} {values[name]:.3f}" for name in ("loss", *SHOWN) if name in values]
        if values.keys() & set(SHOWN) == {"clip"}:  # the loss itself
            shown.pop()
        shown.append(f"{values['samples_per_second']:,.0f} samples/s")
        elapsed = time.perf_counter() - self._began
        left = elapsed / max(1, step - self._start) * (self.total - step)
        shown.append(f"eta {duration(left)}")
        return "  ".join(shown)


def duration(seconds: float) -> str:
    """Seconds as a clock shows them: 0:01:12."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
