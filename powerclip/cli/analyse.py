"""`powerclip analyse nla · cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerclip.cli.process import interruptible

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
    output: Annotated[Path, typer.Option("--output", "-o", help="Where nla.png and nla.json go.")] = Path("runs/nla"),
    batches: Annotated[int, typer.Option("--batches", min=1, help="Batches of 16 pairs.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the vectors and of the regions.")] = 0,
) -> None:
    """Compare the approximation with the exact powerset, over τ and α."""
    with interruptible("nothing was written"):
        from powerclip.evaluate.nla_agreement import analyse, lines

        for study in analyse(output, model, shards=shards, trees=trees, batches=batches, seed=seed, say=print):
            print("\n".join(lines(study)))
    print(f"figure and numbers: {output / 'nla.png'}, nla.json")


@analyse_app.command(
    "cost",
    epilog="\b\nExamples:\n"
    "  powerclip analyse cost\n"
    "  powerclip analyse cost --from benchmarks/results/2026-11-15-step-cuda.json -o runs/h200",
)
def analyse_cost(
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Draw these results, of this command or of benchmarks/; may be repeated."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where cost.png and cost.json go.")] = Path(
        "runs/cost"
    ),
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. [default: a GPU]")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Measure a training step against the number of regions, and of every method beside CLIP.

    ViT-B/16 on a GPU, small towers on a CPU (about five minutes).
    """
    with interruptible("nothing was written"):
        from powerclip.analysis.cost import analyse, lines

        found = analyse(output, sources or (), device=device, say=(lambda text: None) if quiet else print)
    print("\n".join(lines(found)))
    print(f"figure: {output / 'cost.png'}" + ("" if sources else ", numbers: cost.json"))
