"""`powerclip models`: what can be loaded, and why the rest cannot."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


class Format(StrEnum):
    """How the list is printed."""

    TABLE = "table"
    MARKDOWN = "markdown"


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip models\n"
    "  powerclip models siglip --tags\n"
    "  powerclip models 'ViT-B-*' --format markdown",
)
def models(
    pattern: Annotated[
        str | None, typer.Argument(help="A part of the name, or a pattern with * and ?.", show_default=False)
    ] = None,
    tags: Annotated[bool, typer.Option("--tags", help="Name the published weights instead of counting them.")] = False,
    output: Annotated[Format, typer.Option("--format", help="How to print the list.")] = Format.TABLE,
) -> None:
    """List open_clip's models: those that load, with their towers, and the others with the reason.

    Commands and recipes also take folders, runs, checkpoints and models on the hub: docs/models.md.
    """
    from rich.console import Console

    from powerclip.encoders.catalogue import Entry, catalogue
    from powerclip.report.table import Table

    def weights(entry: Entry) -> str:
        return (", ".join(entry.tags) or "–") if tags else str(len(entry.tags))

    entries = catalogue(pattern)
    usable = [entry for entry in entries if entry.obstacle is None]
    others = [entry for entry in entries if entry.obstacle is not None]
    heads = ["model", "image tower", "pooling", "text tower", "tokens", "weights"]
    loads = Table.plain(heads, [[e.name, e.image, e.pooling, e.text, e.context, weights(e)] for e in usable])
    refused = Table.plain(["model", "why it does not load"], [[e.name, e.obstacle] for e in others])
    of_tags = f"{sum(len(e.tags) for e in usable)} of {sum(len(e.tags) for e in entries)} published weights"
    summary = f"{len(usable)} of {len(entries)} models load, with {of_tags}"
    if output is Format.MARKDOWN:
        shown = [table.markdown().rstrip() for table, rows in ((loads, usable), (refused, others)) if rows]
        print("\n\n".join([*shown, summary]))
        return
    console = Console()
    if usable:
        loads.print(console)
    if others:
        refused.print(console)
    console.print(summary, highlight=False)
