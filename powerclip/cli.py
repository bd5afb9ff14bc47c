"""The command line: `powerclip annotate · index · train · compare · quickstart · ground · evaluate · tables · analyse`.

Commands import what they need when they run, so that `powerclip --help` need not wait for torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from powerclip import __version__
from powerclip.errors import UserError
from powerclip.train.signals import EXIT_STOPPED, Stopped

if TYPE_CHECKING:
    from powerclip.annotate.job import Job

# Seconds in which torchrun ends all ranks after the first one has failed.
FIRST_RANK_SPEAKS = 10

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
    if later_rank():
        # Most errors strike all ranks alike, and torchrun ends the others once the first has failed. Whoever is still
        # here after a while has failed alone.
        time.sleep(FIRST_RANK_SPEAKS)
        message = f"rank {os.environ['RANK']}: {message}"
    print(f"powerclip: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def later_rank() -> bool:
    """Whether torchrun started this process as another one than its first."""
    return os.environ.get("RANK", "0") != "0"


def check_one_process(command: str) -> None:
    """UserError when torchrun started several processes for a command that is for one."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"powerclip {command} is for one process; torchrun starts powerclip train and powerclip evaluate"
        )


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Turn Ctrl-C, or a run that a scheduler stopped, into a line that says how to go on, and an exit code for it."""
    try:
        yield
    except Stopped as stopped:
        if not later_rank():
            print(f"powerclip: {stopped}; {advice}", file=sys.stderr)
        raise typer.Exit(EXIT_STOPPED) from None
    except KeyboardInterrupt:
        if not later_rank():
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
        typer.Option("--dry-run", help="Say what would run, how large it is and how long it takes; write nothing."),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End at the first bad sample or annotation; the same as data.strict=true.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Train a model as a recipe says.

    The folder gets the recipe as it was run, metrics.jsonl, tensorboard files, checkpoints, and at the end the model
    as an open_clip directory and results.json with the scores that the recipe's evaluation section asks for.

    SIGUSR1 writes a checkpoint. SIGTERM finishes the step, writes a checkpoint and ends with exit code 75: the same
    command with --resume goes on.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: continue the run or replace it")
    from powerclip.train.recipe import find_recipe, load_recipe

    # An option with an optional value would swallow the override that follows it.
    auto = resume and "auto" in (overrides or ())
    changes = [override for override in overrides or () if not (auto and override == "auto")]
    loaded = load_recipe(recipe, [*changes, *(["data.strict=true"] if strict else [])])
    folder = output or Path("runs") / find_recipe(recipe).stem
    with interruptible(f"continue with the same command and --resume (the run is in {folder})"):
        if dry_run:
            from powerclip.train.dry_run import dry_run as rehearse

            rehearse(loaded, folder, quiet=quiet)
            return
        from powerclip.train.loop import train as run

        run(loaded, folder, resume="auto" if auto else resume, overwrite=overwrite, quiet=quiet)


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
    check_one_process("compare")
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
    check_one_process("quickstart")
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
    "  powerclip evaluate --model my/model --suite retrieval --data ~/benchmarks --datasets flickr8k,flickr30k\n"
    "  powerclip evaluate --model my/model --pointing boxes.json\n"
    "  torchrun --nproc-per-node 8 -m powerclip evaluate --model my/model --suite paper --data ~/benchmarks"
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
    pointing: Annotated[
        list[Path] | None,
        typer.Option("--pointing", help="A .json of phrases and boxes: the pointing game; may be repeated."),
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
            pointing=pointing or [],
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


annotate_app = typer.Typer(
    help="Give every sample of a corpus its parse trees and regions, in sidecars beside its shards.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(annotate_app, name="annotate")

ShardsArgument = Annotated[
    list[str],
    typer.Argument(metavar="SHARDS…", help="Tars, a folder of them, '{00000..00099}.tar', @list.txt, or URLs."),
]
SidecarsOption = Annotated[
    Path | None, typer.Option("--sidecars", help="A folder for the sidecars. [default: beside the shards]")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", "-w", min=1, help="Processes. [default: one a GPU, or one a core]")
]
EngineOption = Annotated[str, typer.Option("--engine", help="local: processes of this machine; ray: a cluster.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="The Ray cluster (auto, ray://head:10001). [default: start one here]")
]
AnnotateDeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1; auto takes a GPU if any.")]
AnnotateQuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print what went wrong only.")]


@annotate_app.callback()
def annotating() -> None:
    """Give every sample of a corpus its parse trees and regions, in sidecars beside its shards."""


@annotate_app.command(
    "trees",
    epilog="\b\nExamples:\n"
    "  powerclip annotate trees cc12m/*.tar\n"
    "  powerclip annotate trees 'cc12m/{00000..01242}.tar' --sidecars sidecars/cc12m --workers 16\n"
    "  powerclip annotate trees @shards.txt --sidecars sidecars --parser stanza --engine ray --address auto",
)
def annotate_trees(
    shards: ShardsArgument,
    parser: Annotated[str, typer.Option("--parser", help="embedded, stanza, benepar or flat.")] = "embedded",
    sidecars: SidecarsOption = None,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    device: AnnotateDeviceOption = "auto",
    quiet: AnnotateQuietOption = False,
) -> None:
    """Parse every caption.

    What is done already is skipped; what was made from other captions or by another parser is done again. Ctrl-C
    finishes the shards that have begun; the same command goes on with the rest.
    """
    from powerclip.annotate.job import Job

    run_annotation(Job("trees", parser, sidecars, device), shards, workers, engine, address, quiet)


@annotate_app.command(
    "regions",
    epilog="\b\nExamples:\n"
    "  powerclip annotate regions cc12m/*.tar\n"
    "  powerclip annotate regions cc12m/*.tar --segmenter mobile_sam --weights mobile_sam.pt --set points=32\n"
    "  powerclip annotate regions cc12m/*.tar --segmenter sam2 --weights facebook/sam2.1-hiera-large\n"
    "  powerclip annotate regions coco/*.tar --segmenter coco --weights instances_train2017.json",
)
def annotate_regions(
    shards: ShardsArgument,
    segmenter: Annotated[
        str, typer.Option("--segmenter", help="superpixels, mobile_sam, sam2 or coco.")
    ] = "superpixels",
    weights: Annotated[
        str | None,
        typer.Option("--weights", help="MobileSAM's file, SAM 2's name or folder, or the JSON file with COCO's masks."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the segmenter; repeatable.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Pictures that the segmenter sees at once.")] = 8,
    sidecars: SidecarsOption = None,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    device: AnnotateDeviceOption = "auto",
    quiet: AnnotateQuietOption = False,
) -> None:
    """Find the regions of every picture.

    Random boxes, the default of training, need none of this. What is done already is skipped; what was made from other
    pictures, by another segmenter or with other settings is done again.
    """
    from powerclip.annotate.job import Job, parse_settings

    options = parse_settings(settings or [])
    job = Job("regions", segmenter, sidecars, device, weights=weights, options=options, batch=batch)
    run_annotation(job, shards, workers, engine, address, quiet)


def run_annotation(
    job: Job, shards: list[str], workers: int | None, engine: str, address: str | None, quiet: bool
) -> None:
    """What `annotate trees` and `annotate regions` share."""
    with interruptible("the shard that was being annotated is as it was; the same command goes on with it"):
        from powerclip.annotate.run import annotate, exit_code
        from powerclip.annotate.shards import list_shards

        tally = annotate(list_shards(shards), job, workers=workers, engine=engine, address=address, quiet=quiet)
    code = exit_code(tally)
    if code == 130:
        print("powerclip: interrupted; the same command goes on with the shards that are left", file=sys.stderr)
    if code:
        raise typer.Exit(code)


@annotate_app.command(
    "status",
    epilog="\b\nExamples:\n"
    "  powerclip annotate status sidecars/cc12m\n"
    "  powerclip annotate status cc12m/*.tar --sidecars sidecars/cc12m",
)
def annotate_status(
    places: Annotated[
        list[str], typer.Argument(metavar="DIR|SHARDS…", help="A folder of sidecars, or the shards they belong to.")
    ],
    sidecars: SidecarsOption = None,
) -> None:
    """Say how much is annotated, by whom, what had to fall back, and what a sample's annotations weigh."""
    from powerclip.annotate.shards import list_shards
    from powerclip.annotate.status import cover_folder, cover_shards, status_lines

    if sidecars is None and len(places) == 1 and Path(places[0]).is_dir():
        found = cover_folder(Path(places[0]))
    else:
        found = cover_shards(list_shards(places), sidecars)
    print("\n".join(status_lines(found)))


@app.command(
    epilog="\b\nExamples:\n  powerclip index '/data/cc12m/{00000..01242}.tar'\n"
    "  powerclip index '/data/cc12m/*.tar' --sidecars sidecars/cc12m --strict"
)
def index(
    shards: Annotated[
        list[str], typer.Argument(metavar="SHARDS…", help="As data.shards: paths, patterns, braces or @list.txt.")
    ],
    sidecars: Annotated[
        Path | None, typer.Option("--sidecars", help="Where indices are kept. [default: beside the shards]")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Whatever is missing or damaged is an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Note where the samples of shards lie, as the first run that reads them would, and count them.

    Worth a command of its own before hundreds of processes start: each tar is read once, by all cores of one machine.
    """
    from powerclip.data.shards import expand_shards, open_shards

    paths = [path for text in shards for path in expand_shards(text, "SHARDS")]
    found = open_shards(paths, sidecars, strict=strict, progress=not quiet)
    if not quiet:
        print(found.summary())
        for what, damaged in found.damage.items():
            print(f"{what}: {', '.join(map(str, damaged[:5]))}{' …' * (len(damaged) > 5)}")


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


@analyse_app.command(
    "cost",
    epilog="\b\nExamples:\n"
    "  powerclip analyse cost\n"
    "  powerclip analyse cost --from benchmarks/results/2026-11-15-methods-cuda.json -o runs/h200",
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


if __name__ == "__main__":
    main()
