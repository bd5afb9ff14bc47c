"""`powerclip detect train · evaluate · show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerclip.cli.process import check_one_process, interruptible
from powerclip.errors import UserError

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
detect_app = typer.Typer(
    help="Find and name boxes, of classes that no box was ever learned for.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(detect_app, name="detect")

Model = Annotated[
    str, typer.Option("--model", "-m", help="A model: an open_clip name, a folder, a run or hf-hub:ORG/NAME.")
]
Pretrained = Annotated[
    str | None, typer.Option("--pretrained", help="A tag of open_clip's weights, or a file with weights.")
]
Images = Annotated[
    list[str] | None,
    typer.Option("--images", help="A folder, .tar or .tar.gz with the images; may be repeated. [default: beside it]"),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]


@detect_app.callback()
def detect() -> None:
    """Find and name boxes, of classes that no box was ever learned for."""


@detect_app.command(
    epilog="\b\nExamples:\n"
    "  powerclip detect train -m runs/powerclip/model --data scenes --steps 500 -o runs/detect-scenes\n"
    "  powerclip detect train -m ViT-B-16/laion2b_s34b_b88k --data coco/annotations/instances_train2017.json\n"
    "  powerclip detect train -m my/model --data train.json.gz --images train.tar.gz --size 240 --dry-run\n"
    "  powerclip detect train -m my/model --data train.json.gz --tune 1e-5 --exponents 0.2,0.45\n"
    "  powerclip detect train -m my/model --data train.json.gz -o runs/detect --resume"
)
def train(
    model: Model,
    data: Annotated[str, typer.Option("--data", help="COCO's instances_….json, plain or gzipped, or 'scenes'.")],
    images: Images = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The run's folder.")] = Path("runs/detect"),
    pretrained: Pretrained = None,
    size: Annotated[
        int | None,
        typer.Option("--size", min=16, help="Pixels of an image's longer side. [default: twice the tower's]"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Updates.")] = 3000,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Images of an update.")] = 16,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate of what is new.")] = 5e-4,
    warmup: Annotated[
        int | None, typer.Option("--warmup", min=0, help="Steps of warm-up. [default: 100, at most a tenth]")
    ] = None,
    tune: Annotated[
        float, typer.Option("--tune", metavar="RATE", help="Learning rate of the image tower; 0 leaves it as it is.")
    ] = 0.0,
    width: Annotated[int, typer.Option("--width", min=8, help="Channels of the feature pyramid.")] = 256,
    hidden: Annotated[int, typer.Option("--hidden", min=8, help="Width of the layers behind a pooled box.")] = 1024,
    exponents: Annotated[
        str | None,
        typer.Option(
            "--exponents",
            metavar="BASE,NOVEL",
            help="How much the tower's own score counts, instead of choosing it on held out base classes.",
        ),
    ] = None,
    calibration_steps: Annotated[
        int, typer.Option("--calibration-steps", min=0, help="Updates that they are chosen after. [default: half]")
    ] = 0,
    scenes: Annotated[int, typer.Option("--scenes", min=1, help="How many, with --data scenes.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights, order, flips and sampled boxes.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run; write nothing.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Train a detector on boxes of base classes, around an image tower that stays as it is.

    Which classes are base is said by the categories ("split": "base" or "novel") or is OV-COCO's. The folder gets the
    tower too, and is complete by itself. SIGTERM writes a checkpoint and exits with 75; --resume continues.
    """
    check_one_process("detect train")
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: continue the run or replace it")

    def advice() -> str:
        from powerclip.detect.recipe import DetectFolder

        begun = not dry_run and DetectFolder(output).holds_run()
        return "continue with the same command and --resume" if begun else "nothing was written"

    with interruptible(advice):
        from powerclip.detect.evaluate import default_size
        from powerclip.detect.recipe import DetectRecipe
        from powerclip.detect.train import describe_run, train_detector
        from powerclip.encoders.resolve import resolve

        recipe = DetectRecipe(
            model=model,
            pretrained=pretrained,
            data=data,
            images=images or [],
            scenes=scenes,
            size=size or default_size(resolve(model, pretrained=pretrained)),
            width=width,
            hidden=hidden,
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            warmup=min(100, steps // 10) if warmup is None else warmup,
            tune=tune,
            seed=seed,
            exponents=_numbers(exponents),
            calibration_steps=calibration_steps,
        )
        if dry_run:
            for line in describe_run(recipe, output):
                print(line)
            return
        train_detector(recipe, output, resume=resume, overwrite=overwrite, device=device, quiet=quiet)


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UserError(f"--exponents: two shares such as 0.2,0.45 are expected, not {text!r}") from None


@detect_app.command(
    epilog="\b\nExamples:\n"
    "  powerclip detect evaluate -m runs/detect --data coco/annotations/instances_val2017.json\n"
    "  powerclip detect evaluate -m runs/detect --data val.json.gz --images val.tar.gz\n"
    "  powerclip detect evaluate -m runs/detect-scenes --data scenes\n"
    "  powerclip detect evaluate -m ViT-B-16/laion2b_s34b_b88k --data val.json.gz --gold-boxes     # no training"
)
def evaluate(
    model: Annotated[str, typer.Option("--model", "-m", help="A detector's folder; with --gold-boxes any model.")],
    data: Annotated[str, typer.Option("--data", help="COCO's instances_….json, plain or gzipped, or 'scenes'.")],
    images: Images = None,
    gold_boxes: Annotated[
        bool, typer.Option("--gold-boxes", help="Name the annotated boxes instead of finding any.")
    ] = False,
    size: Annotated[
        int | None,
        typer.Option(
            "--size", min=16, help="Of a model: pixels of an image's longer side. [default: twice the tower's]"
        ),
    ] = None,
    pretrained: Pretrained = None,
    scenes: Annotated[int, typer.Option("--scenes", min=2, help="How many, with --data scenes.")] = 500,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where results go. [default: evaluation/ of a detector, or results/NAME]"),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure AP50 of base, of novel and of all classes beside the paper's Table 15, or how gold boxes are named.

    All classes are candidates for every box. The detections are written in COCO's format for results.
    """
    check_one_process("detect evaluate")
    with interruptible("nothing was written"):
        from powerclip.detect.evaluate import evaluate_detection

        evaluate_detection(
            model,
            data,
            images or (),
            gold_boxes=gold_boxes,
            scenes=scenes,
            size=size,
            pretrained=pretrained,
            output=output,
            device=device,
            quiet=quiet,
        )


@detect_app.command(
    epilog="\b\nExamples:\n"
    '  powerclip detect show street.jpg "a red umbrella" "a dog" -m runs/detect -o street.png\n'
    "  powerclip detect show street.jpg -m runs/detect     # every class that it has learned"
)
def show(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A detector's folder.")],
    phrases: Annotated[
        list[str] | None,
        typer.Argument(metavar="PHRASE…", help="What to look for: any words. [default: the learned classes]"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The image to write.")] = Path("boxes.png"),
    least: Annotated[float, typer.Option("--score", min=0, max=1, help="Lowest score of a box that is drawn.")] = 0.05,
    most: Annotated[int, typer.Option("--most", min=1, help="Most boxes that are drawn.")] = 20,
    device: Device = "auto",
) -> None:
    """Draw the boxes of whatever you name. The classes that the detector has learned compete, and are not drawn."""
    check_one_process("detect show")
    with interruptible("nothing was written"):
        from powerclip.detect.show import Shown, draw_boxes

        for one in draw_boxes(image, phrases or (), model, output, shown=Shown(least, most), device=device):
            print(f"{one.score:.3f}  {one.name}  ({', '.join(f'{side:.3f}' for side in one.box)})")
    print(f"boxes: {output}")
