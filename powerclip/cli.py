"""The command line: `powerclip train · quickstart · ground`.

Commands import what they need when they run, so that `powerclip --help` need not wait for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from powerclip import __version__
from powerclip.errors import UserError

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

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
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        fail(f"{error.filename}: {error.strerror}")


def fail(message: str) -> NoReturn:
    """Print an error as one line and exit with code 2."""
    print(f"powerclip: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Turn Ctrl-C into a line that says how to go on, and the shell's exit code for it."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"powerclip: interrupted; {advice}", file=sys.stderr)
        raise typer.Exit(130) from None


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print(f"powerclip {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options that stand before the command."""


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip train --recipe recipes/quickstart/powerclip.yaml\n"
    "  powerclip train --recipe quickstart/clip optim.lr=5e-4 train.steps=500 --output runs/longer\n"
    "  powerclip train --recipe quickstart/clip --output runs/longer --resume"
)
def train(
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A recipe file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change in the recipe.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder. [default: runs/NAME-OF-RECIPE]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Train a model as a recipe says.

    The folder gets the recipe as it was run, metrics.jsonl, tensorboard files, checkpoints, and at the end the model
    as an open_clip directory.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: continue the run or replace it")
    from powerclip.train.recipe import find_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or ())
    folder = output or Path("runs") / find_recipe(recipe).stem
    with interruptible(f"continue with the same command and --resume (the run is in {folder})"):
        from powerclip.train.loop import train as run

        run(loaded, folder, resume=resume, overwrite=overwrite, quiet=quiet, evaluate=scene_scores)


def scene_scores(encoder: DualEncoder) -> dict[str, float]:
    """What `train.evaluate_every` logs: the means of the benchmarks on the embedded test scenes."""
    from powerclip.data.tokens import CaptionTokenizer
    from powerclip.encoders import tokenizer_for
    from powerclip.evaluate.scenes import evaluate_scenes

    device = next(encoder.parameters()).device
    results = evaluate_scenes(encoder, CaptionTokenizer(tokenizer_for(encoder)), count=500, device=device)
    return {
        "retrieval": results.retrieval.mean,
        "zero_shot": results.zero_shot[1],
        "composition": results.composition_mean,
        "pointing": results.pointing["words"],
    }


@app.command(epilog="\b\nExamples:\n  powerclip quickstart\n  powerclip quickstart --seed 1 --output runs/quickstart-1")
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the report goes.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the scenes, the weights and the regions.")] = 0,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Train that many pairs and report mean ± standard deviation.")
    ] = 1,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Train for fewer or more steps than the recipes say.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Train CLIP and PowerCLIP side by side on embedded scenes and compare them.

    About six minutes on two CPU cores. Prints a table and writes report.html with curves and heatmaps.
    """
    with interruptible("start again with the same command"):
        from powerclip.analysis.quickstart import run

        run(output=output, seed=seed, seeds=seeds, steps=steps, quiet=quiet)


@app.command(
    epilog="\b\nExamples:\n"
    '  powerclip ground dog.jpg "a dog sitting on a red chair" --model runs/quickstart/powerclip/model -o out.png\n'
    '  powerclip ground dog.jpg "a dog on a chair" --model ViT-B-16 '
    '--tree "(NP (NP a dog) (PP on (NP a chair)))" -o out.png'
)
def ground(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="A picture.")],
    caption: Annotated[str, typer.Argument(metavar="CAPTION", help="What to look for in it.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A model folder, or an open_clip model name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("ground.png"),
    tree: Annotated[
        str | None,
        typer.Option("--tree", help="Its parse tree in Penn brackets; without it each word stands alone."),
    ] = None,
) -> None:
    """Draw where a model sees a caption and each of its phrases."""
    with interruptible("nothing was written"):
        from powerclip.analysis.ground import ground as ground_image

        ground_image(image, caption, model, output, brackets=tree)


if __name__ == "__main__":
    main()
