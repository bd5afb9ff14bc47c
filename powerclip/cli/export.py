"""`powerclip export · push`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powerclip.cli.process import check_one_process, interruptible

if TYPE_CHECKING:
    from powerclip.export.towers import Precision as PrecisionName

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


class Format(str, Enum):  # noqa: UP042 (typer shows the values of a str enum)
    """Where the model goes."""

    hf = "hf"
    onnx = "onnx"
    pt2 = "pt2"


class Precision(str, Enum):  # noqa: UP042
    """Of the weights."""

    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip export runs/quickstart/seed-0/powerclip/model --to onnx -o exported/onnx --check\n"
    "  powerclip export my/model --to onnx --dense --precision fp32 --precision int8 -o onnx --check --data val.csv\n"
    "  powerclip export ViT-B-32/openai --to hf -o exported/hf\n"
    "  powerclip export my/model --to pt2 -o exported/pt2"
)
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run, or an open_clip model name.")],
    to: Annotated[
        Format, typer.Option("--to", help="hf: transformers' CLIPModel; onnx: ONNX graphs; pt2: torch.export.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    dense: Annotated[bool, typer.Option("--dense", help="Give patches and words too (hf always does).")] = False,
    precision: Annotated[
        list[Precision] | None,
        typer.Option("--precision", help="fp32, fp16 or int8 (onnx); may be repeated. [default: fp32]"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the model on images and captions; fail over --bound.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Images with captions for --check: .csv, tars. [default: embedded scenes]"),
    ] = None,
    images: Annotated[int | None, typer.Option("--images", min=2, help="How many images of --data to use.")] = None,
    bound: Annotated[
        float | None,
        typer.Option("--bound", min=0, help="Largest difference. [default: 1e-5, fp16 0.005, int8 0.1]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")] = False,
) -> None:
    """Write a model for transformers, ONNX Runtime and browsers, or torch alone.

    Tokenizer, image processor and a model card lie beside the weights. The folder appears when it is complete; --check
    compares its outputs with the model's before that.
    """
    check_one_process("export")
    from powerclip.errors import UserError

    if not check and (data is not None or images is not None or bound is not None):
        raise UserError("--data, --images and --bound are for --check")
    if images is not None and data is None:
        raise UserError("--images counts those of --data: name some")
    with interruptible("nothing was written"):
        from powerclip.export.folder import CheckOptions, export_model

        export_model(
            model,
            to.value,
            output,
            dense=dense,
            precisions=[one.value for one in dict.fromkeys(precision or [Precision.fp32])],
            check=CheckOptions(data, images, bound) if check else None,
            overwrite=overwrite,
        )


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip push runs/quickstart/seed-0/powerclip my-name/quickstart-clip --dry-run\n"
    "  powerclip push my/model my-org/my-model --private\n"
    "  powerclip push my/model my-org/my-model --onnx fp32 --onnx int8 --data val.csv --yes"
)
def push(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run, or an open_clip model name.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Only you and your organisation can see it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")] = False,
    onnx: Annotated[
        list[Precision] | None,
        typer.Option("--onnx", help="Precision of the ONNX graphs; may be repeated. [default: fp32]"),
    ] = None,
    no_onnx: Annotated[bool, typer.Option("--no-onnx", help="Leave the ONNX graphs out.")] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Images with captions to measure parity on. [default: embedded scenes]"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before sending.")] = False,
) -> None:
    """Upload a model to the Hugging Face hub, with its model card.

    As open_clip reads it, as transformers' CLIPModel where it can be one, and as ONNX graphs. What would be sent is
    shown first, and you are asked. `powerclip.load("hf-hub:ORG/NAME")` reads it back.
    """
    check_one_process("push")
    import sys

    from powerclip.errors import UserError

    if onnx and no_onnx:
        raise UserError("--onnx and --no-onnx contradict each other: give one")
    if not (yes or dry_run or sys.stdin.isatty()):
        raise UserError(
            "there is no terminal to ask on: --yes sends without asking, --dry-run shows what would be sent"
        )
    with interruptible("nothing was sent"):
        from powerclip.export.folder import CheckOptions
        from powerclip.export.push import PushOptions, push_model

        precisions: list[PrecisionName] = []
        if not no_onnx:
            precisions = [one.value for one in dict.fromkeys(onnx or [Precision.fp32])]
        options = PushOptions(private, dry_run, precisions, check=CheckOptions(data))
        push_model(model, repo, options, confirm=lambda: yes or typer.confirm("send this?"))
