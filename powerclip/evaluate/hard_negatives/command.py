"""`powerclip negatives`: hard negatives of captioned images, as a file that `powerclip evaluate` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rich.console import Console

from powerclip.errors import UserError
from powerclip.evaluate.grid import captions_with_trees
from powerclip.evaluate.hard_negatives.make import KINDS, make_negatives, to_json
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import CaptionRetrieval
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress, print_line


def write_negatives(
    data: Path, output: Path, corpus: Sequence[Path] = (), *, most: int, seed: int = 0, quiet: bool = False
) -> dict[str, int]:
    """Make hard negatives of the captioned images at `data`, write them to `output`, and count them by kind.

    Args:
        data: tars, a folder of them, or a table, as `powerclip evaluate` reads them.
        output: a .json file.
        corpus: further captioned images, whose captions tell what can be said; their images are not looked at.
        most: negatives of a kind.
        seed: of the choice among possible negatives.
        quiet: print nothing.

    Raises:
        UserError: something cannot be read, or the captions are too few to make a negative.
    """
    if output.suffix.lower() != ".json":
        raise UserError(f"--output {output}: a .json file is expected, which `powerclip evaluate` reads")
    captioned = _read(data)
    owners = captioned.image_of_caption.tolist()
    more: list[list[str]] = []
    for path in corpus:
        other = _read(path)
        texts: list[list[str]] = [[] for _ in other.images.names]
        for caption, image in zip(other.captions, other.image_of_caption.tolist(), strict=True):
            texts[image].append(caption)
        more += texts
    trees = captions_with_trees(captioned)
    with Progress("negatives", unit="captions", quiet=quiet, transient=True) as progress:
        made = make_negatives(
            captioned.captions,
            owners,
            trees,
            more,
            most=most,
            seed=seed,
            on_progress=lambda done: progress.update(done, total=len(owners)),
        )
    counts = made.counts()
    if not made.negatives:
        raise UserError(
            f"{data}: no caption could be changed ({len(owners):,} captions): name more captions of the same style "
            "with --corpus"
        )
    write_atomic(output, to_json(made, [_file_name(name) for name in captioned.images.names]).encode())
    if not quiet:
        shown = ", ".join(f"{kind} {counts[kind]:,} of {made.candidates[kind]:,} possible" for kind in KINDS)
        print_line(Console(), f"{len(made.negatives):,} hard negatives: {shown}")
        print_line(Console(), f"evaluate them: powerclip evaluate {output} --images {data} --model MODEL")
    return counts


def _read(path: Path) -> CaptionRetrieval:
    captioned = read_path(path)
    if not isinstance(captioned, CaptionRetrieval):
        raise UserError(f"{path}: images with captions are expected (tars, a table, a folder)")
    return captioned


def _file_name(name: str) -> str:
    """The file of an image, without its folder or its tar: `val.tar: 0/dog.jpg` → `dog.jpg`."""
    return PurePosixPath(name.rpartition(": ")[2]).name
