"""`powerclip annotate trees · regions · status`, `powerclip index` and `powerclip pack`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powerclip.cli.process import interruptible, table_columns

if TYPE_CHECKING:
    from powerclip.annotate.job import Job

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
annotate_app = typer.Typer(
    help="Give every sample of a corpus its parse trees and regions, in sidecars beside its shards.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(annotate_app, name="annotate")

ShardsArgument = Annotated[
    list[str],
    typer.Argument(metavar="SHARDS…", help="Tars, a folder of them, '{00000..00099}.tar', @list.txt, URLs; or tables."),
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
AnnotateQuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]


ImageColumnOption = Annotated[
    str, typer.Option("--image-column", help="Of a table: the column that holds images. [default: by its head]")
]
CaptionColumnOption = Annotated[
    list[str] | None, typer.Option("--caption-column", help="Of a table: one that holds captions; may be repeated.")
]


@annotate_app.callback()
def annotating() -> None:
    """Give every sample of a corpus its parse trees and regions, in sidecars beside its shards."""


@annotate_app.command(
    "trees",
    epilog="\b\nExamples:\n"
    "  powerclip annotate trees cc12m/*.tar\n"
    "  powerclip annotate trees captions.csv --image-column photo --caption-column title\n"
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
    image_column: ImageColumnOption = "",
    caption_column: CaptionColumnOption = None,
    quiet: AnnotateQuietOption = False,
) -> None:
    """Parse every caption.

    What is done already is skipped; what was made from other captions or by another parser is done again. Ctrl-C
    finishes the shards that have begun; the same command goes on with the rest.
    """
    from powerclip.annotate.job import Job

    columns = table_columns(image_column, caption_column)
    run_annotation(Job("trees", parser, sidecars, device, columns=columns), shards, workers, engine, address, quiet)


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
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images that the segmenter sees at once.")] = 8,
    sidecars: SidecarsOption = None,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    device: AnnotateDeviceOption = "auto",
    image_column: ImageColumnOption = "",
    caption_column: CaptionColumnOption = None,
    quiet: AnnotateQuietOption = False,
) -> None:
    """Find the regions of every image.

    Random boxes, the default of training, need none of this. What is done already is skipped; what was made from other
    images, by another segmenter or with other settings is done again.
    """
    from powerclip.annotate.job import Job, parse_settings

    options = parse_settings(settings or [])
    columns = table_columns(image_column, caption_column)
    job = Job("regions", segmenter, sidecars, device, weights, options, batch, columns)
    run_annotation(job, shards, workers, engine, address, quiet)


def run_annotation(
    job: Job, shards: list[str], workers: int | None, engine: str, address: str | None, quiet: bool
) -> None:
    """Run the job of `annotate trees` or `annotate regions`."""
    with interruptible("the shard that was being annotated is as it was; the same command goes on with it"):
        from powerclip.annotate.run_shards import annotate, exit_code
        from powerclip.annotate.shard_list import list_shards

        summary = annotate(
            list_shards(shards, job.columns), job, workers=workers, engine=engine, address=address, quiet=quiet
        )
    code = exit_code(summary)
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
    sources: Annotated[
        list[str], typer.Argument(metavar="DIR|SHARDS…", help="A folder of sidecars, or the shards they belong to.")
    ],
    sidecars: SidecarsOption = None,
    image_column: ImageColumnOption = "",
    caption_column: CaptionColumnOption = None,
) -> None:
    """Show how much is annotated and by which annotator, how many fallbacks there are, and the bytes per sample."""
    from powerclip.annotate.shard_list import list_shards
    from powerclip.annotate.status import cover_folder, cover_shards, status_lines

    columns = table_columns(image_column, caption_column)
    if sidecars is None and len(sources) == 1 and Path(sources[0]).is_dir():
        coverage = cover_folder(Path(sources[0]))
    else:
        coverage = cover_shards(list_shards(sources, columns), sidecars, columns)
    print("\n".join(status_lines(coverage)))


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
    strict: Annotated[bool, typer.Option("--strict", help="Treat missing or damaged shards as an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Index the samples of shards, as the first run that reads them would, and count them.

    Useful before hundreds of processes start: each tar is read once, by all cores of one machine.
    """
    from powerclip.data.shards import expand_shards, open_shards
    from powerclip.errors import UserError

    if sidecars is not None and sidecars.exists() and not sidecars.is_dir():
        raise UserError(f"--sidecars {sidecars}: it is a file, not a folder")
    paths = [path for text in shards for path in expand_shards(text, "SHARDS")]
    shard_set = open_shards(paths, sidecars, strict=strict, progress=not quiet)
    if not quiet:
        print(shard_set.summary())
        for what, damaged in shard_set.damage.items():
            print(f"{what}: {', '.join(map(str, damaged[:5]))}{' …' * (len(damaged) > 5)}")


@app.command(
    epilog="\b\nExamples:\n  powerclip pack captions.csv -o shards\n"
    "  powerclip pack photos/ -o shards --images 10000     # a folder of NAME.jpg and NAME.txt\n"
    "  powerclip pack data.parquet -o shards --image-column file --caption-column title --caption-column alt"
)
def pack(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="A .csv, .tsv, .jsonl or .parquet file, or a folder of images.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the shards.")],
    image_column: ImageColumnOption = "",
    caption_column: CaptionColumnOption = None,
    images: Annotated[int, typer.Option("--images", min=1, help="How many go into a shard.")] = 1000,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Write a table's images and captions into indexed webdataset shards.

    Training reads tables as they are; shards are for file systems that dislike small files, for buckets and for other
    tools. Rows without a readable image are left out and named in NNNNN.skipped.tsv. The same command goes on where it
    stopped.
    """
    from powerclip.data.pack import pack_table
    from powerclip.data.table import is_table
    from powerclip.errors import UserError

    if not table.exists():
        raise UserError(f"TABLE: there is no {table}")
    if not is_table(table):
        raise UserError(f"TABLE: {table} is no table (.csv, .tsv, .jsonl, .parquet, or NAME.jpg and NAME.txt)")
    with interruptible("shards that are finished are kept; the same command goes on with the rest"):
        columns = table_columns(image_column, caption_column)
        read, packed = pack_table(table, output, columns, images=images, quiet=quiet)
    if not quiet:
        print(f"{table}: {read.summary()}")
        print(f"{output}: {packed.summary()}")
