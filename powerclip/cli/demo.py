"""`powerclip demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerclip.cli.process import check_one_process, interruptible

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    epilog="\b\nExamples:\n"
    "  powerclip demo --open\n"
    "  powerclip demo runs/clip/model runs/powerclip/model --pictures ~/photos\n"
    "  powerclip demo ViT-B-16 --pretrained laion2b_s34b_b88k --mobile-sam mobile_sam.pt\n"
    "  powerclip demo --export site/"
)
def demo(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL…",
            help="Model folders or names, side by side. [default: the quickstart's two, or the one in the package]",
        ),
    ] = None,
    pictures: Annotated[Path | None, typer.Option("--pictures", help="A folder with pictures to show first.")] = None,
    port: Annotated[int, typer.Option("--port", help="Where the page is; 0 takes a free port.")] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="Whom to serve: 127.0.0.1 is this machine, 0.0.0.0 everyone.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write a page with examples that needs no server, and exit.")
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option("--pretrained", help="A tag of open_clip's weights, or a file with weights.")
    ] = None,
    mobile_sam: Annotated[
        Path | None, typer.Option("--mobile-sam", help="MobileSAM's weights, for regions that follow objects.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Open a page that shows where models see each phrase of a caption, and which set of regions fits it best."""
    check_one_process("demo")
    with interruptible("nothing was written"):
        from powerclip.demo.run import DemoOptions, serve

        options = DemoOptions(models or (), pretrained, pictures, mobile_sam, device, host, port, open_browser)
        if export is None:
            serve(options)
        else:
            from powerclip.demo.export import export_page

            print(f"page: {export_page(options, export)}")
