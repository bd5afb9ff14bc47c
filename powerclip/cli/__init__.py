"""The command line, by subject: data (annotate, index, pack), training, evaluation, detection, the live page, analyses,
export.

Commands import what they need when they run, so that `powerclip --help` need not wait for torch.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import Annotated, NoReturn

import typer

from powerclip import __version__
from powerclip.cli import analyse as analyses
from powerclip.cli import annotate as annotation
from powerclip.cli import demo as demonstration
from powerclip.cli import detect as detection
from powerclip.cli import evaluate as evaluation
from powerclip.cli import export as exports
from powerclip.cli import models as catalogue
from powerclip.cli import train as training
from powerclip.cli.process import is_other_rank
from powerclip.errors import UserError

# Seconds in which torchrun ends all ranks after the main one has failed.
MAIN_RANK_SECONDS = 10

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, the largest file allowed

app = typer.Typer(
    name="powerclip",
    help="Train, test and look into CLIP models that align every set of image regions with every phrase.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; what the user got wrong is one line and exit code 2."""
    try:
        app()
    except UserError as error:
        fail(str(error))
    except RuntimeError as error:
        # torch raises for a killed worker wherever this process is, also while it ends.
        if "DataLoader worker" not in str(error):
            raise
        from powerclip.data.loader import WORKER_KILLED

        fail(WORKER_KILLED)
    except OSError as error:
        if error.filename is None and error.errno in FULL:  # from a file that was open already
            fail(f"{error.strerror}: make room where the output goes; finished runs and checkpoints are kept")
        if error.filename is None or error.strerror is None:
            raise
        fail(f"{error.filename}: {error.strerror}")


def fail(message: str) -> NoReturn:
    """Print an error as one line and exit with code 2."""
    if is_other_rank():
        # Most errors occur on all ranks, and torchrun ends the others once the main one has failed. A rank that is
        # still running after that has failed alone.
        time.sleep(MAIN_RANK_SECONDS)
        message = f"rank {os.environ['RANK']}: {message}"
    print(f"powerclip: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        print(f"powerclip {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


for subject in (annotation, training, evaluation, detection, demonstration, analyses, catalogue, exports):
    app.add_typer(subject.app)


if __name__ == "__main__":
    main()
