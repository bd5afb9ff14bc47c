"""`powerclip ground · evaluate · negatives · tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerclip.cli.process import interruptible, table_columns
from powerclip.errors import UserError
from powerclip.runtime.shipped import MODEL

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    epilog="\b\nExamples:\n"
    '  powerclip ground scene.png "a red circle above a small blue star"     # by the model in the package\n'
    '  powerclip ground dog.jpg "a dog sitting on a red chair" --model runs/quickstart/seed-0/powerclip/model\n'
    '  powerclip ground dog.jpg "a dog on a chair" --model ViT-B-16 --pretrained laion2b_s34b_b88k -o chair.png\n'
    '  powerclip ground dog.jpg "a dog on a chair" -m runs/a/model --tree "(NP (NP a dog) (PP on (NP a chair)))"\n'
    '  powerclip ground dog.jpg "a dog on a red chair" "a dog on a blue chair" -m runs/a/model -m runs/b/model\n'
    '  powerclip ground dog.jpg "a dog on a red chair" -m runs/locked/model --relative     # what tells phrases apart'
)
def ground(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image.")],
    captions: Annotated[
        list[str], typer.Argument(metavar="CAPTION…", help="What to look for in it: a caption, and edits of it.")
    ],
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            "-m",
            help="A model: an open_clip name, a folder, a run, a checkpoint or hf-hub:ORG/NAME; may be repeated. "
            "The one in the package knows drawn scenes only.",
        ),
    ] = [MODEL],  # noqa: B006
    output: Annotated[Path, typer.Option("--output", "-o", help="The image to write.")] = Path("ground.png"),
    tree: Annotated[
        list[str] | None,
        typer.Option("--tree", help="A caption's parse tree in Penn brackets; without it the caption is parsed."),
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option("--pretrained", help="A tag of open_clip's weights, or a file with weights.")
    ] = None,
    relative: Annotated[
        bool,
        typer.Option(
            "--relative", help="Phrases less their mean: what tells them apart, where all have nearly the same heatmap."
        ),
    ] = False,
) -> None:
    """Draw heatmaps of where models locate captions and each of their phrases."""
    with interruptible("nothing was written"):
        from powerclip.evaluate.ground_figure import draw_grounding

        written = draw_grounding(
            image, captions, model, output, brackets=tree or None, pretrained=pretrained, relative=relative
        )
    print(f"heatmaps: {written}")


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip evaluate photos/ captions.csv --model runs/quickstart/seed-0/powerclip/model\n"
    "  powerclip evaluate captions.csv --image-column photo --caption-column title --model my/model\n"
    "  powerclip evaluate --model ViT-B-16 --pretrained laion2b_s34b_b88k --suite paper --data ~/benchmarks\n"
    "  powerclip evaluate --model my/model --suite retrieval --data ~/benchmarks --datasets flickr8k,flickr30k\n"
    "  powerclip evaluate --model my/model --pointing boxes.json\n"
    "  powerclip evaluate --model my/model --grounding flickr8k-val.jsonl.gz --images captions10k/val-000.tar\n"
    "  powerclip evaluate --model my/model --grid captions10k/val-000.tar     # grounding without boxes\n"
    "  powerclip evaluate --model runs/quickstart/seed-0/powerclip/model --scenes 1000\n"
    "  powerclip evaluate --model my/model negatives.json --images captions10k/val-000.tar\n"
    "  powerclip evaluate captions.csv --model runs/mine --score powerset --rerank 100     # or --score late\n"
    "  torchrun --nproc-per-node 8 -m powerclip evaluate --model my/model --suite paper --data ~/benchmarks"
)
def evaluate(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A model: an open_clip name, a folder, a run, a checkpoint or hf-hub:ORG/NAME."
        ),
    ],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH…", help="Your own data: class folders, tables of captions, .json of hard negatives, tars."
        ),
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option("--pretrained", help="A tag of open_clip's weights, or a file with weights.")
    ] = None,
    pointing: Annotated[
        list[Path] | None,
        typer.Option("--pointing", help="A .json of phrases and boxes: the pointing game; may be repeated."),
    ] = None,
    grounding: Annotated[
        list[Path] | None,
        typer.Option("--grounding", help="A .jsonl(.gz) of captions, phrases and boxes; may be repeated."),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", help="A tar or folder with the images of --grounding or a .json; may be repeated."),
    ] = None,
    grid: Annotated[
        list[Path] | None,
        typer.Option("--grid", help="Captioned images, as PATH: mosaics of four, no boxes needed; may be repeated."),
    ] = None,
    scenes: Annotated[int, typer.Option("--scenes", min=0, help="Embedded test scenes: no data needed.")] = 0,
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="paper, classification, retrieval, robustness, composition, probe or multilabel."),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="The folder that holds the suite's datasets.")] = None,
    datasets: Annotated[
        list[str] | None, typer.Option("--datasets", help="Only these of the suite: a,b; may be repeated.")
    ] = None,
    score: Annotated[
        str,
        typer.Option(
            "--score", help="What compares images with texts: global embeddings, late or powerset (by parts)."
        ),
    ] = "global",
    rerank: Annotated[
        int, typer.Option("--rerank", min=0, help="Score only so many best by global embeddings anew. [default: all]")
    ] = 0,
    boxes: Annotated[
        str | None, typer.Option("--boxes", help="Of powerset: 10 random boxes, or 3x3: all boxes of a grid.")
    ] = None,
    alignment: Annotated[
        list[str] | None,
        typer.Option(
            "--alignment", metavar="KEY=VALUE", help="Of powerset: other settings than the run's; repeatable."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the results go. [default: results/NAME-OF-MODEL]")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not cache embeddings.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure finished datasets of the suite again.")] = False,
    image_column: Annotated[
        str, typer.Option("--image-column", help="Of a table: the column that holds images. [default: by its head]")
    ] = "",
    caption_column: Annotated[
        list[str] | None, typer.Option("--caption-column", help="Of a table: one that holds captions; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Measure a model on your own data or on the paper's benchmarks.

    Each dataset becomes a JSON file in clip-benchmark's schema. Datasets that are missing are listed with where to get
    them, and the rest is measured; the same command goes on where it stopped.

    --score late compares each patch with each token, as FILIP does; --score powerset the regions of an image with the
    phrases of a text, by the alignment settings of the run that the model comes from, or the default ones.
    """
    with interruptible("the same command goes on where it stopped"):
        from powerclip.evaluate.runner import evaluate_model
        from powerclip.train.score_settings import score_settings

        evaluate_model(
            model,
            paths or [],
            pretrained=pretrained,
            pointing=pointing or [],
            grounding=grounding or [],
            images=images or [],
            grid=grid or [],
            scenes=scenes,
            suite=suite,
            data=data,
            datasets=[name.strip() for part in datasets or [] for name in part.split(",") if name.strip()],
            output=output,
            device=device,
            cache=not no_cache,
            again=again,
            quiet=quiet,
            columns=table_columns(image_column, caption_column),
            score=score_settings(model, score, rerank=rerank, boxes=boxes, alignment=alignment or ()),
        )


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip negatives captions10k/val-000.tar -o negatives.json --corpus captions10k/train-000.tar\n"
    "  powerclip evaluate negatives.json --images captions10k/val-000.tar --model my/model"
)
def negatives(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Captioned images: a tar, a folder of tars, or a .csv.", exists=True)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .json file to write.")] = Path("negatives.json"),
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus", exists=True, help="More captions, as DATA, as evidence of what can be said; repeatable."
        ),
    ] = None,
    most: Annotated[int, typer.Option("--most", min=2, help="Negatives of a kind.")] = 4000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the choice among possible negatives.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Make hard negatives from your captions: one change away from a caption, false of its image, and readable.

    Nouns, attributes and prepositions are replaced, noun phrases and attributes exchanged. They come in couples, so
    that a model without the image is right in half of them. The file has SugarCrepe's format.
    """
    with interruptible("nothing was written"):
        from powerclip.evaluate.hard_negatives.command import write_negatives

        write_negatives(data, output, corpus or (), most=most, seed=seed, quiet=quiet)


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip tables results/my-model results/ViT-B-16-laion2b_s34b_b88k\n"
    "  powerclip tables results/* --output tables.tex --radar figure-2.png\n"
    "  powerclip tables runs/paper_table6 runs/paper_table8     # studies of powerclip compare: the paper's ablations\n"
    "  powerclip tables     # all that the paper has published"
)
def tables(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RESULTS…]", help="Result files, folders of them, and folders of studies."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .md, .tex or .html file. [default: print Markdown]")
    ] = None,
    published: Annotated[bool, typer.Option(help="Show the paper's published rows as well.")] = True,
    radar: Annotated[
        Path | None, typer.Option("--radar", help="Also draw all benchmarks as a radar plot: a .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Set results beside the paper's published ones: its tables, and its Figure 2.

    Results of powerclip evaluate fill Tables 1 to 5, 9, 11 and 12, those of powerclip detect evaluate Table 15; studies
    of powerclip compare fill Tables 6, 7, 8, 10, 13 and 14, and benchmarks/methods.py Table 13.
    """
    from powerclip.evaluate.paper_studies import ablation_tables, read_measured
    from powerclip.evaluate.paper_tables import build_tables, collect, draw_radar, render
    from powerclip.runtime.files import write_atomic

    paths = results or []
    read = {path: read_measured(path) for path in paths}
    measured = [study for study in read.values() if study is not None]
    others = [path for path, study in read.items() if study is None]
    records = collect(others)
    built = build_tables(records, published) if others or not paths else []
    ablations = ablation_tables(measured, published) if measured or not paths else []
    if measured and not ablations:
        raise UserError(f"{paths[0]}: none of its settings is one of the paper's Tables 6, 7, 8, 10, 13 and 14")
    page = render(built, output.suffix.lstrip(".").lower() if output is not None else "md", ablations)
    if radar is not None:
        draw_radar(records, published, radar)
    if output is None:
        print(page, end="")
    else:
        write_atomic(output, page.encode())
        print(f"tables: {output}")
    if radar is not None:
        print(f"radar plot: {radar}")
