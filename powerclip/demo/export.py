"""The page as one file that needs no server: the examples with their answers inside it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress

if TYPE_CHECKING:
    from powerclip.demo.engine import Engine
    from powerclip.demo.run import DemoOptions
    from powerclip.evaluate.ground import GroundSettings

SEEDS = 2
SIDE = 512  # longest side of the pictures in the file
MOST_EXAMPLES = 8


def export_page(options: DemoOptions, folder: Path) -> Path:
    """Write `index.html` into a folder; it opens from the disk.

    Raises:
        UserError: the folder is a file, or what `powerclip demo` would not serve either.
    """
    from powerclip.demo.run import make_engine, needs_server

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: --export names a folder")
    needs_server()
    target = folder / "index.html"
    write_atomic(target, standalone(saved_examples(make_engine(options))).encode())
    return target


def saved_examples(engine: Engine) -> dict[str, Any]:
    """Everything that the page may ask without a server: examples × kinds of regions × ways to score."""
    from powerclip.demo.engine import Question
    from powerclip.demo.server import about, pair_matrices

    described = about(engine)
    examples = [picture for picture in engine.pictures.listed if picture.caption][:MOST_EXAMPLES]
    known = {picture.id for picture in examples}
    described["pictures"] = [one for one in described["pictures"] if one["id"] in known]
    settings = list(_settings())
    answers: dict[str, Any] = {}
    maps: dict[str, Any] = {}
    with Progress("examples", len(examples), unit="pictures", transient=True) as progress:
        for picture in examples:
            for setting in settings:
                question = Question((picture.id,), (picture.caption, picture.second), setting)
                (answer,) = engine.answer([question])
                if isinstance(answer, UserError):
                    raise answer
                key = "|".join(
                    (
                        picture.id,
                        setting.regions.kind,
                        str(setting.regions.seed),
                        setting.similarity,
                        setting.aggregation,
                    )
                )
                answers[key] = {}
                for caption in question.captions:
                    answers[key][caption] = found = [one.to_json() for one in answer.of(picture.id, caption)]
                    for number, one in enumerate(found):
                        del one["settings"]  # the key says them
                        # The same for all settings, and most of the bytes.
                        shown = [one.pop("heatmap"), *(phrase.pop("heatmap") for phrase in one["phrases"])]
                        maps[f"{picture.id}\n{caption}\n{number}"] = shown
            progress.advance()
    paired = examples[:4]
    question = Question(tuple(one.id for one in paired), tuple(one.caption for one in paired), settings[0])
    (answer,) = engine.answer([question])
    if isinstance(answer, UserError):
        raise answer
    return {
        "about": described,
        "pictures": {picture.id: _data_address(*engine.pictures.encoded(picture.id, SIDE)) for picture in examples},
        "answers": answers,
        "maps": maps,
        "pairs": {
            "pictures": question.pictures,
            "captions": question.captions,
            "models": pair_matrices(answer, question, [model.name for model in engine.models]),
        },
        "regions": ["random", "superpixels"],
        "seeds": SEEDS,
    }


def standalone(examples: dict[str, Any]) -> str:
    """The page with its style, its scripts and the examples in one file.

    A policy of its own lets it run these scripts and nothing else, and connect to nowhere.
    """
    from powerclip.demo.server import SCRIPTS, page_file

    style = page_file("style.css").decode()
    script = "\n".join(page_file(name).decode() for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    # "<" could end the element that holds the data.
    data = json.dumps(examples, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = page_file("index.html").decode()
    page = re.sub(r'<script src="[^"]*"></script>\n', "", page)
    page = page.replace(
        '<link rel="stylesheet" href="page/style.css">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>',
    )
    saved = f'<script type="application/json" id="saved-examples">{data}</script>\n<script>{script}</script>\n'
    return page.replace("</body>", f"{saved}</body>")


def _settings() -> Iterator[GroundSettings]:
    from powerclip.evaluate.ground import GroundSettings
    from powerclip.evaluate.ground_regions import Regions

    for kind in ("random", "superpixels"):
        for seed in range(SEEDS):
            base = GroundSettings(Regions(kind, seed=seed))  # type: ignore[arg-type]
            yield base
            for similarity in ("sum", "mean", "relative"):
                for aggregation in ("exact", "nla"):
                    yield replace(base, similarity=similarity, aggregation=aggregation)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_address(content: bytes, media: str) -> str:
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
