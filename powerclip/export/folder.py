"""An export as a folder: written, checked and described; all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from powerclip.encoders import DualEncoder, load
from powerclip.encoders.text import reads_ahead
from powerclip.encoders.transforms import Tokenizer
from powerclip.errors import UserError
from powerclip.export.card import describe_run, model_card
from powerclip.export.check import CheckData, Checker, Exported, Parity, check_bound, read_data, scene_data
from powerclip.export.onnx import OnnxModel, require_onnx, write_onnx
from powerclip.export.processor import require_transformers, write_processor
from powerclip.export.pt2 import Pt2Model, write_pt2
from powerclip.export.towers import Precision
from powerclip.runtime.files import draft_folder
from powerclip.runtime.progress import Progress, print_line

Format = Literal["hf", "onnx", "pt2"]
PRECISIONS: dict[Format, tuple[Precision, ...]] = {
    "hf": ("fp32", "fp16"),
    "onnx": ("fp32", "fp16", "int8"),
    "pt2": ("fp32", "fp16"),
}


@dataclass(frozen=True)
class CheckOptions:
    """On what parity is measured, and what is accepted."""

    data: Path | None = None  # images with captions, as `powerclip evaluate` reads them; None: embedded scenes
    images: int | None = None  # how many of them; None: all
    bound: float | None = None  # largest difference; None: the precision's own

    def read(self, model: DualEncoder) -> CheckData:
        """The images and captions."""
        return scene_data(model) if self.data is None else read_data(self.data, self.images)


def export_model(
    source: str | Path,
    format: Format,
    output: str | Path,
    *,
    dense: bool = False,
    precisions: Sequence[Precision] = ("fp32",),
    check: CheckOptions | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> list[Parity]:
    """Write the model `source` into the folder `output` as a CLIPModel, as ONNX graphs or as torch programs.

    Args:
        source: what `powerclip.load` takes.
        format: `hf`, `onnx` or `pt2`.
        output: the folder; it appears when everything in it is written, and checked if asked for.
        dense: patches and words too, in ONNX graphs and torch programs. A CLIPModel always has them.
        precisions: of the weights; several in one folder as ONNX or torch programs.
        check: measure parity with the model; None does not.
        overwrite: replace what is at `output`.
        console: where to print; standard output by default.

    Returns:
        The parity of each precision, where it was checked.

    Raises:
        UserError: no such model, a form that it cannot take, a difference over the bound, a full disk.
    """
    console = console or Console()
    target = Path(output).expanduser()
    check_request(format, precisions, target, overwrite=overwrite)
    model, preprocess, tokenizer = load(source)
    model = model.eval()
    # Before anything is written: a mistyped path of --data should not cost an export.
    checker = None if check is None else Checker(model, preprocess, tokenizer, check.read(model))
    parities: list[Parity] = []
    try:
        with draft_folder(target) as draft, Progress(f"export {format}", len(precisions), transient=True) as progress:
            if reads_ahead(model.clip):
                pad_id = model.config["text_cfg"].get("pad_id", 0)
                progress.warn(
                    f"the text tower reads its padding: pad input_ids to {model.context_length} tokens with id "
                    f"{pad_id}, which transformers' CLIPTokenizer does not do by itself"
                )
            for precision in precisions:
                write_format(model, tokenizer, draft, format, precision, dense=dense)
                if checker is not None and check is not None:
                    parity = checker.measure(open_export(draft, format, precision), format, precision, draft)
                    print_line(console, parity.line())
                    for warning in parity.warnings():
                        progress.warn(warning)
                    check_bound(parity, check.bound)
                    parities.append(parity)
                progress.advance()
            card = model_card(target.name, model, describe_run(source), parities, contents={format}, dense=dense)
            (draft / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target}: could not write the export: {error.strerror or error}; nothing is left") from error
    for path, size in files_of(target):
        print_line(console, f"{size / 1e6:10.1f} MB  {target / path}")
    return parities


def check_request(format: Format, precisions: Sequence[Precision], target: Path, *, overwrite: bool) -> None:
    """Raise `UserError` for what can be known to fail before a model is loaded."""
    for precision in precisions:
        if precision not in PRECISIONS[format]:
            known = " or ".join(PRECISIONS[format])
            raise UserError(f"--to {format} has no precision {precision}: choose {known}, or --to onnx")
    if format == "hf" and len(precisions) > 1:
        raise UserError("--to hf writes one precision: the dtype of from_pretrained gives the others")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; choose another --output folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UserError(f"{target} is not empty; use --overwrite to replace it, or another --output folder")
    if format == "onnx":
        require_onnx()
    require_transformers()


def write_format(
    model: DualEncoder, tokenizer: Tokenizer, folder: Path, format: Format, precision: Precision, *, dense: bool
) -> None:
    """Write one form of the model in one precision, with the files that prepare its input."""
    if format == "hf":
        from powerclip.export.hugging_face import write_hugging_face

        write_hugging_face(model, tokenizer, folder, precision=precision)
        return
    if format == "onnx":
        write_onnx(model, folder, dense=dense, precision=precision)
    else:
        write_pt2(model, folder, dense=dense, precision=precision)
    write_processor(model, tokenizer, folder)


def open_export(folder: Path, format: Format, precision: Precision) -> Exported:
    """An export that runs."""
    if format == "onnx":
        return OnnxModel(folder, precision)
    if format == "pt2":
        return Pt2Model(folder, precision)
    from powerclip.export.hugging_face import HuggingFaceModel

    return HuggingFaceModel(folder)


def files_of(folder: Path) -> list[tuple[Path, int]]:
    """The files below `folder`, by their paths in it, and their bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder), path.stat().st_size) for path in files]
