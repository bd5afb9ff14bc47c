"""Run benchmarks for one model: what is missing is listed, what is damaged is named, what is finished is kept.

Each result is one JSON file in clip-benchmark's schema, with what it was measured on beside the metrics.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from powerclip.errors import UserError
from powerclip.evaluate.boxes import read_boxes
from powerclip.evaluate.embedder import Embedder, digest_of
from powerclip.evaluate.ranks import on_all
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.suites import BENCHMARKS, Benchmark, MissingError, find_benchmark
from powerclip.evaluate.tasks import Scored, Task
from powerclip.evaluate.watch import watching
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.runtime.files import write_atomic

if TYPE_CHECKING:
    from powerclip.data.tokens import CaptionTokenizer
    from powerclip.encoders import DualEncoder


@dataclass(frozen=True)
class Job:
    """One dataset to evaluate."""

    name: str  # in the results
    file: str  # of its result, without a suffix
    find: Callable[[], Task]
    where: str  # where its data lie
    fixed: bool = False  # a published dataset, which does not change: a finished result stays


@dataclass(frozen=True)
class Evaluated:
    """What a run of several datasets came to: dataset → result files, or why there are none."""

    results: dict[str, list[dict[str, Any]]]
    missing: dict[str, str]
    failed: dict[str, str]


def jobs_for_paths(paths: Sequence[Path], pointing: Sequence[Path] = ()) -> list[Job]:
    """One job for each path of the user's own data, named after it; `pointing` are files of boxes."""
    jobs: list[Job] = []
    readers: list[tuple[Path, Callable[[Path], Task]]] = [(path, read_path) for path in paths]
    # A user's own data never pass for a dataset of the paper.
    taken = {_file_name(name) for benchmark in BENCHMARKS for name in (benchmark.name, benchmark.key)}
    for path, read in [*readers, *((path, read_boxes) for path in pointing)]:
        name = next(name for name in _names(path.resolve()) if _file_name(name) not in taken)
        taken.add(_file_name(name))
        jobs.append(Job(name, _file_name(name), partial(read, path), str(path)))
    return jobs


def _names(path: Path) -> Iterator[str]:
    """What the data at a path may be called: its name, with as many folders before it as it takes, then numbered."""
    name = path.stem if path.is_file() else path.name
    yield name
    for folder in path.parents:
        if folder.name:
            name = f"{folder.name}/{name}"
            yield name
    yield from (f"{name} {number}" for number in count(2))


def jobs_for_suite(benchmarks: Sequence[Benchmark], root: Path) -> list[Job]:
    """One job for each benchmark of a suite."""
    return [
        Job(
            benchmark.name,
            _file_name(benchmark.key),
            partial(find_benchmark, benchmark, root),
            str(root),
            fixed=True,
        )
        for benchmark in benchmarks
    ]


def evaluate(
    encoder: DualEncoder,
    tokenizer: CaptionTokenizer,
    jobs: Sequence[Job],
    output: Path,
    *,
    model: str,
    pretrained: str | None = None,
    cache: bool = True,
    again: bool = False,
    quiet: bool = False,
    console: Console | None = None,
    ranks: Ranks = SINGLE,
) -> Evaluated:
    """Evaluate a model on datasets, one result file for each below `output`.

    Args:
        encoder: the model, on the device that shall compute.
        tokenizer: its tokenizer.
        jobs: the datasets.
        output: the folder of the results; embeddings are kept in `output/embeddings`.
        model: what the results call the model.
        pretrained: its weights, where the model is an open_clip name.
        cache: keep embeddings.
        again: measure published datasets anew that are finished. A user's own are always read again: they may have
            changed, and what has not is in the cache.
        quiet: print nothing.
        console: where to print; standard output by default.
        ranks: the processes that evaluate together; the first prints and writes.

    Raises:
        UserError: no dataset could be evaluated.
    """
    console = console or Console()
    quiet = quiet or not ranks.is_main
    digest = digest_of(encoder).hex()
    embedder = Embedder(encoder, tokenizer, output / "embeddings" if cache else None, ranks=ranks)
    done = Evaluated({}, {}, {})
    for number, job in enumerate(jobs, 1):
        head = f"[{number:{len(str(len(jobs)))}d}/{len(jobs)}] {job.name}: "
        path = output / f"{job.file}.json"
        kept = None
        if job.fixed and not again:
            kept = ranks.broadcast(partial(_finished, path, digest, job.where))
        try:
            with watching(console, head, quiet) as embedder.watch:
                records = kept or _measure(job, embedder, model, pretrained, digest)
        except MissingError as error:
            done.missing[job.file] = str(error)
            line = f"missing; {error}"
        except UserError as error:
            done.failed[job.file] = str(error)
            line = f"failed; {error}"
        else:
            if kept is None and ranks.is_main:
                content = records[0] if len(records) == 1 else records
                write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
            done.results[job.file] = records
            line = describe(records) + (" (finished before)" if kept else "")
        if not quiet:
            console.print(head + line, markup=False, highlight=False, soft_wrap=True)
    if not done.results:
        reasons = [*done.failed.values(), *done.missing.values()]
        raise UserError(f"no dataset could be evaluated: {reasons[0] if reasons else 'none was named'}")
    return done


def describe(records: Sequence[dict[str, Any]]) -> str:
    """The metrics of a result in one line, in percent."""
    parts = []
    for record in records:
        metrics = {name: value for name, value in record["metrics"].items() if value is not None}
        if len(records) > 1:  # one number tells a part
            metrics = {record["dataset"].rpartition("/")[2]: metrics["acc"]}
        parts += [f"{_short(name)} {100 * value:.1f}" for name, value in metrics.items()]
    corrupt = records[0]["powerclip"]["corrupt"]
    notes = [f"{len(corrupt)} unreadable: {', '.join(corrupt[:3])}"] if corrupt else []
    counts = records[0]["powerclip"]["counts"]
    missing, small = counts.get("missing"), counts.get("too small")
    notes += [f"{missing:,} comparisons left out: their images are not there"] if missing else []
    notes += [f"{small:,} of {counts['phrases']:,} boxes lie between the centres of patches"] if small else []
    return " · ".join(parts) + (f" ({'; '.join(notes)})" if notes else "")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The results in one file: ours, or one that clip-benchmark wrote.

    Raises:
        UserError: it holds no results.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    records = content if isinstance(content, list) else [content]
    if not records or not all(map(_is_result, records)):
        raise UserError(f"{path}: no result of an evaluation (dataset, model, task and metrics are expected)")
    return records


def _is_result(record: Any) -> bool:
    if not isinstance(record, dict) or not {"dataset", "model", "task", "metrics"} <= record.keys():
        return False
    about = record.get("powerclip", {})
    return isinstance(record["metrics"], dict) and isinstance(about, dict) and isinstance(about.get("counts", {}), dict)


def _measure(job: Job, embedder: Embedder, model: str, pretrained: str | None, digest: str) -> list[dict[str, Any]]:
    started = time.perf_counter()
    task = on_all(embedder.ranks, job.find)
    scored: Scored = task.score(embedder)
    about = {
        "counts": scored.counts,
        "corrupt": list(scored.corrupt),
        "seconds": round(time.perf_counter() - started, 3),
        "weights": digest,
        "data": job.where,
    }
    return [
        {
            "dataset": f"{job.name}/{part}" if part else job.name,
            "model": model,
            "pretrained": pretrained or "",
            "task": task.task,
            "metrics": metrics,
            "language": "en",
            "powerclip": about,
        }
        for part, metrics in scored.parts.items()
    ]


def _finished(path: Path, digest: str, where: str) -> list[dict[str, Any]] | None:
    """The results of an earlier run, if it was of the same weights and the same data."""
    if not path.is_file():
        return None
    try:
        records = read_records(path)
    except UserError:
        return None
    same = all(
        record.get("powerclip", {}).get("weights") == digest and record["powerclip"].get("data") == where
        for record in records
    )
    return records if same else None


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _short(name: str) -> str:
    shown = {
        "image_retrieval_recall": "image R",
        "text_retrieval_recall": "text R",
        "mean_average_precision": "mAP",
        "pointing_words": "in caption",
        "pointing_text": "alone",
        "pointing_chance": "chance",
    }
    head, at, rest = name.partition("@")
    return f"{shown.get(head, head)}{at}{rest}"
