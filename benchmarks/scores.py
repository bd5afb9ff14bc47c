"""Trained models scored by global embeddings, by late interaction and by powersets, on Flickr8k val and hard negatives.

    python benchmarks/scores.py runs/scores-tiny --negatives negatives.json -o runs/scores

`MODELS` holds `METHOD/seed-N/model`, as `powerclip compare --keep-models` leaves them; `--methods a,b` takes some.
`$POWERCLIP_DATA` holds `captions10k/`. Each run's model is scored with its own alignment settings, others with the
default. What is done is written after each model, and the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measure import run

from powerclip.compare.significance import paired_p
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import load
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder, PixelStore
from powerclip.evaluate.part_tasks import score_by_parts
from powerclip.evaluate.readers import read_negatives, read_path
from powerclip.evaluate.tasks import HardNegatives, Task
from powerclip.report.table import Table, fixed, signed
from powerclip.runtime.distributed import choose_device
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.train.score_settings import score_settings

# What is measured: label → options of `powerclip evaluate`.
SCORES: dict[str, dict[str, Any]] = {
    "global": {"score": "global"},
    "late": {"score": "late"},
    "late of the 100 best": {"score": "late", "rerank": 100},
    "powerset": {"score": "powerset"},
    "powerset of the 100 best": {"score": "powerset", "rerank": 100},
    "powerset, T2R alone": {"score": "powerset", "alignment": ["r2t=false"]},
    "powerset, T2R of any size": {"score": "powerset", "alignment": ["r2t=false", "largest_set=0"]},
    "powerset, all boxes of 3x3": {"score": "powerset", "boxes": "3x3"},
    "powerset, all boxes of 3x3, of the 100 best": {"score": "powerset", "boxes": "3x3", "rerank": 100},
}
COLUMNS = {
    "mean recall": ("val", "mean_recall"),
    "text R@1": ("val", "text_retrieval_recall@1"),
    "image R@1": ("val", "image_retrieval_recall@1"),
    "negatives": ("negatives", "acc"),
    "nouns": ("negatives", "replace_obj/acc"),
    "attributes": ("negatives", "replace_att/acc"),
}

Measured = dict[str, dict[str, dict[str, dict[str, float]]]]  # method/seed-N → score → data → metric → share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--methods", help="a,b; all by default")
    parser.add_argument("--negatives", type=Path, help="hard negatives of `powerclip negatives` for the same images")
    parser.add_argument("--scores", help=f"of {', '.join(map(repr, SCORES))}, with '; ' between them; all by default")
    parser.add_argument("--images", type=int, help="only the first so many: a trial")
    parser.add_argument("--output", "-o", type=Path, required=True)
    given = parser.parse_args()
    labels = given.scores.split("; ") if given.scores else list(SCORES)
    if unknown := [label for label in labels if label not in SCORES]:
        raise UserError(f"score {unknown[0]!r} is not one of {', '.join(map(repr, SCORES))}")
    val = Path(os.environ["POWERCLIP_DATA"]) / "captions10k" / "val-000.tar"
    tasks: dict[str, Task] = {"val": read_path(val)}
    if given.negatives is not None:
        tasks["negatives"] = read_negatives(given.negatives, [val])
    if given.images:
        tasks = {name: first(task, given.images) for name, task in tasks.items()}
    written = given.output / "scores.json"
    measured: Measured = json.loads(written.read_text())["runs"] if written.is_file() else {}
    pixels, wanted = PixelStore(), given.methods.split(",") if given.methods else None
    # Seed by seed: a run that is cut short has all methods.
    models = sorted(given.models.glob("*/seed-*/model"), key=lambda path: (path.parent.name, path.parent.parent.name))
    models = [path for path in models if wanted is None or path.parent.parent.name in wanted]
    for path in models:
        name = f"{path.parent.parent.name}/{path.parent.name}"
        if name in measured:
            continue
        started = time.perf_counter()
        encoder, _, tokenizer = load(path, device=choose_device("auto"))
        embedder = Embedder(encoder, CaptionTokenizer(tokenizer), given.output / "cache", pixels=pixels)
        found = {label: measure(embedder, str(path), tasks, SCORES[label]) for label in labels}
        measured[name] = found
        shown = ", ".join(f"{label} {100 * one['val']['mean_recall']:.1f}" for label, one in found.items())
        print(f"{name}: {shown} ({time.perf_counter() - started:.0f} s)", flush=True)
        content = {"machine": machine(), "scores": SCORES, "runs": measured}
        write_atomic(written, (json.dumps(content, indent=1) + "\n").encode())
    pages = [table.markdown() for table in tables(measured)]
    write_atomic(given.output / "scores.md", ("\n\n".join(pages) + "\n").encode())
    print("\n\n".join(pages))


def first(task: Any, count: int) -> Any:
    """The first images of a task."""
    from dataclasses import fields, replace

    owners = task.image_of_item if isinstance(task, HardNegatives) else task.image_of_caption
    kept = (owners < count).nonzero()[:, 0]
    changed: dict[str, Any] = {"images": replace(task.images, members=task.images.members[:count])}
    for part in fields(task):
        value = getattr(task, part.name)
        if hasattr(value, "__len__") and len(value) == len(owners) and part.name != "images":
            changed[part.name] = value[kept] if value is owners else [value[row] for row in kept.tolist()]
    return replace(task, **changed)


def measure(
    embedder: Embedder, model: str, tasks: dict[str, Task], options: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Data → metrics of one score. Where there are two candidates only, re-ranking changes nothing."""
    settings = score_settings(model, **options)
    chosen = {name: task for name, task in tasks.items() if not (settings.rerank and isinstance(task, HardNegatives))}
    if settings.score == "global":
        return {name: task.score(embedder).flat() for name, task in chosen.items()}
    return {name: score_by_parts(task, embedder, settings).flat() for name, task in chosen.items()}


def tables(measured: Measured) -> list[Table]:
    """For each method the scores that all its runs have: means over seeds, mean recall paired with the global one."""
    by_method: dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]] = {}
    for name, scores in measured.items():
        method, _, seed = name.partition("/")
        by_method.setdefault(method, {})[seed] = scores
    found = []
    for method, seeds in by_method.items():
        rows = []
        for label in SCORES:
            if not all(label in one for one in seeds.values()):
                continue
            cells = []
            for data, metric in COLUMNS.values():
                values = [
                    100 * one[label][data][metric] for one in seeds.values() if metric in one[label].get(data, {})
                ]
                cells.append(f"{fixed(mean(values))} ± {fixed(stdev(values))}" if len(values) > 1 else shown(values))
            recalls, base = (
                [100 * one[which]["val"]["mean_recall"] for one in seeds.values()] for which in (label, "global")
            )
            p = paired_p(recalls, base) if label != "global" else None
            difference = "" if label == "global" else signed(mean(recalls) - mean(base))
            rows.append([label, *cells, difference + (f" (p = {p:.2g})" if p is not None else "")])
        table = Table.plain(["", *COLUMNS, "Δ mean recall"], rows)
        found.append(Table(table.columns, table.rows, title=f"{method}, {len(seeds)} seeds", corner="score"))
    return found


def shown(values: list[float]) -> str:
    return fixed(values[0]) if values else "–"


if __name__ == "__main__":
    run(main)
