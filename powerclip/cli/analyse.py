"""`powerclip analyse nla`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerclip.cli.process import interruptible
from powerclip.errors import UserError

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
analyse_app = typer.Typer(
    help="Measure the method itself.", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.add_typer(analyse_app, name="analyse")


@analyse_app.callback()
def analyses() -> None:
    """Measure the method itself."""


@analyse_app.command(
    "nla",
    epilog="\b\nExamples:\n"
    "  powerclip analyse nla\n"
    "  powerclip analyse nla --model runs/quickstart/seed-0/powerclip/model\n"
    "  powerclip analyse nla --model my/model --shards 'photos/val-*.tar' --trees photos/trees.tsv.gz",
)
def analyse_nla(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Study this model's embeddings as well: of --shards, or embedded scenes."),
    ] = None,
    shards: Annotated[
        str | None, typer.Option("--shards", help="Tars of images with captions: a file, or a pattern in quotes.")
    ] = None,
    trees: Annotated[
        str | None,
        typer.Option("--trees", help="A .tsv(.gz) of their trees: key, caption number, brackets. [default: flat]"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where figures and nla.json go.")] = Path("runs/nla"),
    batches: Annotated[int, typer.Option("--batches", min=1, help="Batches of 16 pairs.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the vectors and of the regions.")] = 0,
) -> None:
    """Compare the approximation with the exact powerset, over τ and α: the paper's Figures 5 and 7."""
    with interruptible("nothing was written"):
        from rich.console import Console

        from powerclip.evaluate.nla_agreement import NlaStudy, analyse

        study = NlaStudy(model, shards, trees, batches=batches, seed=seed)
        for grid in analyse(output, study, report=print):
            grid.table().print(Console())
    print(f"figures and numbers: {output / 'nla.png'}, nla-losses.png (Figure 5), nla-scores.png (Figure 7), nla.json")


@analyse_app.command("cost", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def analyse_cost() -> None:
    """Say what replaced this command."""
    raise UserError("analyse cost is a benchmark now: in a checkout of the project, run python benchmarks/cost.py")
