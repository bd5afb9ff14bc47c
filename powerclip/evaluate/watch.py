"""What the person who started an evaluation sees meanwhile: how many images of a dataset are embedded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Watch = Callable[[int, int], None]  # images done, images in all


def unwatched(done: int, total: int) -> None:
    """Nobody looks."""


@contextmanager
def watching(console: Console, name: str, quiet: bool = False) -> Iterator[Watch]:
    """A bar that goes away at the end, on a terminal; nothing in a log."""
    if quiet or not console.is_terminal:
        yield unwatched
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape(name), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
