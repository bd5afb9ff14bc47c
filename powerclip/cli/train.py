"""`powerclip train · blend · compare · quickstart`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerclip.cli.process import check_one_process, interruptible
from powerclip.errors import UserError

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip train --recipe recipes/quickstart/powerclip.yaml\n"
    "  powerclip train --recipe quickstart/clip optim.lr=5e-4 train.steps=500 --output runs/longer\n"
    "  powerclip train --recipe quickstart/clip --output runs/longer --resume\n"
    "  powerclip train --recipe cc12m/powerclip_r --resume auto --output runs/r     # in a job that may be preempted\n"
    "  powerclip train --recipe cc12m/powerclip_r --dry-run\n"
    "  POWERCLIP_DATA=~/data powerclip train --recipe captions10k/powerclip\n"
    "  torchrun --nproc-per-node 8 -m powerclip train --recipe captions10k/powerclip"
)
def train(
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A recipe file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change in the recipe.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder. [default: runs/NAME-OF-RECIPE]")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the unfinished run in the folder; '--resume auto' begins one where there is none.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would run, how large it is and how long it takes; write nothing."),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End at the first bad sample or annotation; the same as data.strict=true.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Train a model as a recipe says.

    The folder gets the recipe as it was run, metrics.jsonl, tensorboard files, checkpoints, and at the end the model
    as an open_clip directory and results.json with the scores of the recipe's evaluation section.

    SIGUSR1 writes a checkpoint. SIGTERM finishes the step, writes a checkpoint and exits with 75: the same command
    with --resume continues.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: continue the run or replace it")
    from powerclip.train.recipe import find_recipe, load_recipe

    # An option with an optional value would swallow the override that follows it.
    auto = resume and "auto" in (overrides or ())
    changes = [override for override in overrides or () if not (auto and override == "auto")]
    loaded = load_recipe(recipe, [*changes, *(["data.strict=true"] if strict else [])])
    folder = output or Path("runs") / find_recipe(recipe).stem

    def advice() -> str:
        from powerclip.train.run_folder import RunFolder

        if not dry_run and RunFolder(folder).continues(loaded):
            return f"continue with the same command and --resume (the run is in {folder})"
        return "no run was begun: the same command starts again"

    with interruptible(advice):
        if dry_run:
            from powerclip.train.dry_run import dry_run as print_dry_run

            print_dry_run(loaded, folder, quiet=quiet)
            return
        from powerclip.train.loop import train as run

        run(loaded, folder, resume="auto" if auto else resume, overwrite=overwrite, quiet=quiet)


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip compare studies/captions10k.yaml --seeds 5\n"
    "  powerclip compare studies/captions10k.yaml --seeds 5 --keep-models     # then, once the settings are chosen:\n"
    "  powerclip compare studies/captions10k.yaml --seeds 5 --test $POWERCLIP_DATA/captions10k/test-000.tar\n"
    "  powerclip compare studies/learning/*.yaml --seeds 3     # several studies; what they share is trained once\n"
    "  powerclip compare studies/learning/*.yaml --seeds 3 --processes 3     # small towers leave a large GPU idle\n"
    "  powerclip compare studies/captions10k.yaml train.steps=100 --only paper --output runs/short\n"
    "  powerclip compare quickstart/clip quickstart/powerclip train.steps=100"
)
def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY…|RECIPE… [KEY=VALUE…]", help="Studies or recipes: files, or names of shipped ones."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The study's folder, of several studies the one that theirs lie in. [default: runs/NAME-OF-STUDY]",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from 0 on.")] = 3,
    seed_list: Annotated[str | None, typer.Option("--seed-list", help="Which seeds instead: 0,1,7")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A setting to run beside the baseline; may be repeated.")
    ] = None,
    keep_models: Annotated[
        bool,
        typer.Option("--keep-models", help="Save the trained models too; finished runs without one are trained again."),
    ] = False,
    test: Annotated[
        list[Path] | None,
        typer.Option(
            "--test",
            metavar="PATH",
            help="Held-out data to measure the kept models on, as powerclip evaluate reads them; may be repeated.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            "-p",
            min=1,
            help="Runs to train at a time. [default: one for each GPU, or one]",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the tables only.")] = False,
) -> None:
    """Train several settings over several seeds and compare them in one table.

    A study file names a recipe and what each setting changes in it; recipes can be compared directly, the first is the
    baseline. Finished runs are kept: the same command continues where it stopped. A run that a study in a
    neighbouring folder has finished with the same recipe is copied, not trained again.

    Several studies run one after the other, each into its own folder; if one fails, the others go on.

    --processes trains several runs at a time, on one GPU or on all of them. A process that dies is replaced, and its
    run is started again. Runs that share a GPU, or the CPU, have no time in the table.

    --test is for the end, when the settings are chosen: it measures the models of all runs on held-out data, and
    writes test.md and test.json. Nothing that is finished is trained again, and nothing is measured twice.
    """
    check_one_process("compare")
    files = [argument for argument in arguments if "=" not in argument or Path(argument).is_file()]
    overrides = [argument for argument in arguments if argument not in files]
    seed_numbers = parse_seeds(seed_list) if seed_list is not None else list(range(seeds))
    with interruptible("the same command goes on with the runs that are left"):
        from powerclip.compare.pool import start_processes
        from powerclip.compare.run import RunOptions, compare_studies, compare_study
        from powerclip.compare.study import Study, are_studies, read_studies, read_study

        if are_studies(files):
            studies, folder = read_studies(files, overrides, only or ()), output or Path("runs")
            readable = [study for study in studies.values() if isinstance(study, Study)]
            with start_processes(processes, readable) as pool:
                options = RunOptions(keep_models=keep_models, quiet=quiet, processes=pool)
                compare_studies(studies, folder, seed_numbers, options, test or ())
            return
        study = read_study(files, overrides)
        study = study.only(only) if only else study
        folder = output or Path("runs") / (Path(files[0]).stem if len(files) == 1 else "compare")
        with start_processes(processes, [study]) as pool:
            options = RunOptions(keep_models=keep_models, quiet=quiet, processes=pool)
            compare_study(study, folder, seed_numbers, options, test or ())


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip blend ViT-B-16/openai runs/mine -o models/between\n"
    "  powerclip blend models/start runs/mine --share 0.3 -o models/mostly-start"
)
def blend(
    first: Annotated[str, typer.Argument(metavar="A", help="The model that training started from.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model that came of it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    share: Annotated[
        float, typer.Option("--share", min=0, max=1, help="How far to go from A to B: 0 is A, 1 is B.")
    ] = 0.5,
) -> None:
    """Average the weights of two models with the same towers (WiSE-FT).

    Between a pretrained model and the same model fine-tuned there is often one that has most of what was learned and
    has lost less of what was known. Both are models as every command takes them; the folder is an open_clip model.
    """
    check_one_process("blend")
    with interruptible("nothing was written"):
        from powerclip.encoders import load, save
        from powerclip.encoders.blend import blend as average

        (one, _, tokenizer), (other, _, _) = load(first), load(second)
        save(average(one, other, share), output, tokenizer)
    print(f"{output}: {1 - share:g} of {first} and {share:g} of {second}")


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
    check_one_process("quickstart")
    with interruptible("the same command continues where it stopped"):
        from powerclip.compare.quickstart import run_quickstart

        run_quickstart(output, seed=seed, seeds=seeds, steps=steps, quiet=quiet)
