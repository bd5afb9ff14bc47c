"""What commands share: their rank under torchrun, their exit when they are interrupted, the columns of tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from powerclip.errors import UserError
from powerclip.runtime.signals import EXIT_PREEMPTED, Preempted

if TYPE_CHECKING:
    from powerclip.data.columns import Columns


def is_other_rank() -> bool:
    """Whether torchrun started this process as another rank than the main one."""
    return os.environ.get("RANK", "0") != "0"


def check_one_process(command: str) -> None:
    """UserError when torchrun started several processes for a command that is for one."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"powerclip {command} is for one process; torchrun starts powerclip train and powerclip evaluate"
        )


@contextmanager
def interruptible(advice: str | Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C, or a run that a scheduler stopped, into a line that says how to go on, and an exit code for it.

    What to say may depend on how far the command came: then `advice` is called when it is needed.
    """

    def say(what: str) -> None:
        if not is_other_rank():
            print(f"powerclip: {what}; {advice if isinstance(advice, str) else advice()}", file=sys.stderr)

    try:
        yield
    except Preempted as stopped:
        say(str(stopped))
        raise typer.Exit(EXIT_PREEMPTED) from None
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None


def table_columns(image: str, captions: Sequence[str] | None) -> Columns:
    """The columns of a table that options name; those that they do not are guessed."""
    from powerclip.data.columns import Columns

    return Columns(image, tuple(captions or ()), ("--image-column", "--caption-column"))
