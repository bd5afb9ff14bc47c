"""The command line: `powerclip train · compare · quickstart · ground · evaluate · tables · analyse`.

Commands import what they need when they run, so that `powerclip --help` need not wait for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from powerclip import __version__
from powerclip.errors import UserError

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
    "  powerclip train --recipe quickstart/clip --output runs/longer --resume\n"
    "  POWERCLIP_DATA=~/data powerclip train --recipe captions10k/powerclip"
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
    as an open_clip directory and results.json with the scores that the recipe's evaluation section asks for.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: continue the run or replace it")
    from powerclip.train.recipe import find_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or ())
    folder = output or Path("runs") / find_recipe(recipe).stem
    with interruptible(f"continue with the same command and --resume (the run is in {folder})"):
        from powerclip.train.loop import train as run

        run(loaded, folder, resume=resume, overwrite=overwrite, quiet=quiet)


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip compare studies/captions10k.yaml --seeds 5\n"
    "  powerclip compare studies/captions10k.yaml train.steps=100 --only paper --output runs/short\n"
    "  powerclip compare quickstart/clip quickstart/powerclip train.steps=100"
)
def compare(
    arguments: Annotated[
        list[str], typer.Argument(metavar="STUDY|RECIPE… [KEY=VALUE…]", help="A study file, or recipes to compare.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The study's folder. [default: runs/NAME-OF-STUDY]")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from 0 on.")] = 3,
    seed_list: Annotated[str | None, typer.Option("--seed-list", help="Which seeds instead: 0,1,7")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A setting to run beside the baseline; may be repeated.")
    ] = None,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Save the trained models too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the table only.")] = False,
) -> None:
    """Train several settings over several seeds and compare them in one table.

    A study file names a recipe and what each setting changes in it; recipes can be compared directly, the first is the
    baseline. Runs that are finished are kept: the same command goes on where it stopped.
    """
    files = [argument for argument in arguments if "=" not in argument or Path(argument).is_file()]
    overrides = [argument for argument in arguments if argument not in files]
    chosen = parse_seeds(seed_list) if seed_list is not None else list(range(seeds))
    with interruptible("the same command goes on with the runs that are left"):
        from powerclip.analysis.study import read_study
        from powerclip.analysis.study_run import run_study

        study = read_study(files, overrides)
        folder = output or Path("runs") / (Path(files[0]).stem if len(files) == 1 else "compare")
        run_study(study.only(only) if only else study, folder, chosen, keep_models=keep_models, quiet=quiet)


def parse_seeds(text: str) -> list[int]:
    """The seeds in `0,1,7`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--seed-list: {text!r} is not a list of whole numbers such as 0,1,7")
    return list(dict.fromkeys(map(int, parts)))


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

    About five minutes on two CPU cores. Prints a table and writes report.html with curves and heatmaps.
    """
    with interruptible("start again with the same command"):
        from powerclip.analysis.quickstart import run

        run(output=output, seed=seed, seeds=seeds, steps=steps, quiet=quiet)


@app.command(
    epilog="\b\nExamples:\n"
    '  powerclip ground dog.jpg "a dog sitting on a red chair" --model runs/quickstart/seed-0/powerclip/model\n'
    '  powerclip ground dog.jpg "a dog on a chair" --model ViT-B-16 '
    '--tree "(NP (NP a dog) (PP on (NP a chair)))" -o chair.png\n'
    '  powerclip ground dog.jpg "a dog on a red chair" "a dog on a blue chair" -m runs/a/model -m runs/b/model'
)
def ground(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="A picture.")],
    captions: Annotated[
        list[str], typer.Argument(metavar="CAPTION…", help="What to look for in it: a caption, and edits of it.")
    ],
    model: Annotated[
        list[str], typer.Option("--model", "-m", help="A model folder, or an open_clip model name; may be repeated.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("ground.png"),
    tree: Annotated[
        list[str] | None,
        typer.Option("--tree", help="A caption's parse tree in Penn brackets; without it each word stands alone."),
    ] = None,
) -> None:
    """Draw where models see captions and each of their phrases."""
    with interruptible("nothing was written"):
        from powerclip.analysis.ground import ground as ground_image

        written = ground_image(image, captions, model, output, brackets=tree or None)
    print(f"heatmaps: {written}")


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip evaluate photos/ captions.csv --model runs/quickstart/seed-0/powerclip/model\n"
    "  powerclip evaluate --model ViT-B-16 --pretrained laion2b_s34b_b88k --suite paper --data ~/benchmarks\n"
    "  powerclip evaluate --model my/model --suite retrieval --data ~/benchmarks --datasets flickr8k,flickr30k"
)
def evaluate(
    model: Annotated[str, typer.Option("--model", "-m", help="A model folder, or an open_clip model name.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH…", help="Your own data: class folders, .csv of captions, .json of hard negatives, tars."
        ),
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option("--pretrained", help="A tag of open_clip's weights, or a file with weights.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="paper, classification, retrieval, robustness, composition or probe."),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="The folder that holds the suite's datasets.")] = None,
    datasets: Annotated[
        list[str] | None, typer.Option("--datasets", help="Only these of the suite: a,b; may be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the results go. [default: results/NAME-OF-MODEL]")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. [default: a GPU]")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep no embeddings.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure finished datasets of the suite anew.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Measure a model on your own data or on the paper's benchmarks.

    Each dataset becomes a JSON file in clip-benchmark's schema. Datasets that are missing are listed with where to get
    them, and the rest is measured; the same command goes on where it stopped.
    """
    with interruptible("the same command goes on where it stopped"):
        from powerclip.evaluate.command import evaluate_model

        evaluate_model(
            model,
            paths or [],
            pretrained=pretrained,
            suite=suite,
            data=data,
            datasets=[name.strip() for part in datasets or [] for name in part.split(",") if name.strip()],
            output=output,
            device=device,
            cache=not no_cache,
            again=again,
            quiet=quiet,
        )


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip tables results/my-model results/ViT-B-16-laion2b_s34b_b88k\n"
    "  powerclip tables results/* --output tables.tex"
)
def tables(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS…", help="Result files, or folders of them.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .md, .tex or .html file. [default: print Markdown]")
    ] = None,
    published: Annotated[bool, typer.Option(help="Show the paper's published rows as well.")] = True,
) -> None:
    """Set results beside the paper's published ones: its Tables 1 to 5 and the linear probe."""
    from powerclip.evaluate.table_formats import render
    from powerclip.evaluate.tables import build_tables, collect
    from powerclip.files import write_whole

    form = output.suffix.lstrip(".").lower() if output is not None else "md"
    page = render(build_tables(collect(results), published), form)
    if output is None:
        print(page, end="")
    else:
        write_whole(output, page.encode())
        print(f"tables: {output}")


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
    "  powerclip analyse nla --model runs/quickstart/seed-0/powerclip/model",
)
def analyse_nla(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Study this model's embeddings of embedded scenes as well.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where nla.png and nla.json go.")] = Path("runs/nla"),
    batches: Annotated[int, typer.Option("--batches", min=1, help="Batches of 16 pairs.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the vectors and of the regions.")] = 0,
) -> None:
    """Compare the approximation with the exact powerset, over τ and α."""
    with interruptible("nothing was written"):
        from powerclip.analysis.nla import analyse, lines

        for study in analyse(output, model, batches=batches, seed=seed):
            print("\n".join(lines(study)))
    print(f"figure and numbers: {output / 'nla.png'}, nla.json")


if __name__ == "__main__":
    main()
