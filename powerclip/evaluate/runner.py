"""`powerclip evaluate`: benchmarks for one model; missing datasets are listed, finished results are kept.

    torchrun --nproc-per-node 8 -m powerclip evaluate --model M --suite paper --data ROOT

Each result is one JSON file in clip-benchmark's schema, with what it was measured on beside the metrics. Under torchrun
each rank embeds its share, and all go through the same datasets in the same order and compute the same metrics, so that
an error is raised on all of them; the main one prints and writes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from powerclip.data.columns import Columns
from powerclip.errors import UserError
from powerclip.evaluate.boxes import read_boxes
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.entities import read_entities
from powerclip.evaluate.grid import read_grid
from powerclip.evaluate.pair_scores import ScoreSettings
from powerclip.evaluate.part_tasks import score_by_parts
from powerclip.evaluate.readers import read_negatives, read_path
from powerclip.evaluate.scenes import scene_grounding, scene_tasks
from powerclip.evaluate.suites import BENCHMARKS, Benchmark, MissingError, choose, find_benchmark
from powerclip.evaluate.tasks import CaptionRetrieval, Grounding, Scored, Task
from powerclip.runtime.distributed import Ranks, choose_device, join_ranks
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress, print_line


@dataclass(frozen=True)
class Job:
    """One dataset to evaluate."""

    name: str  # in the results
    file: str  # of its result, without a suffix
    find: Callable[[], Task]
    where: str  # where its data lie
    fixed: bool = False  # a published dataset, which does not change: a finished result stays
    score: ScoreSettings | None = None  # by which images are compared with texts; None: global embeddings


@dataclass(frozen=True)
class Evaluated:
    """The outcome for several datasets: dataset → results, or why there are none."""

    results: dict[str, list[dict[str, Any]]]
    missing: dict[str, str]
    failed: dict[str, str]


def evaluate_model(
    model: str,
    paths: Sequence[Path],
    *,
    pretrained: str | None = None,
    pointing: Sequence[Path] = (),
    grounding: Sequence[Path] = (),
    images: Sequence[Path] = (),
    grid: Sequence[Path] = (),
    scenes: int = 0,
    suite: str | None = None,
    data: Path | None = None,
    datasets: Sequence[str] = (),
    output: Path | None = None,
    device: str = "auto",
    cache: bool = True,
    again: bool = False,
    quiet: bool = False,
    columns: Columns | None = None,
    score: ScoreSettings | None = None,
) -> Evaluated:
    """Load the model and evaluate it on what is named: paths, boxes, phrases, mosaics, a suite.

    One argument for each option of the command. Embeddings are kept in `output/embeddings`.

    Raises:
        UserError: there is nothing to evaluate on, or a name is not known.
    """
    with join_ranks(device) as ranks:
        # Cheap checks come first, before the model is loaded.
        of_suite = ranks.raise_on_all(lambda: _suite_jobs(suite, data, datasets))
        own = ranks.raise_on_all(
            lambda: _own_jobs(paths, pointing, grounding, images, grid, suite, columns, any_other=scenes > 0)
        )
        name = "-".join(filter(None, [_name(model), pretrained]))
        target = output or Path("results") / _file_name(name, "-")

        from powerclip.data.tokens import CaptionTokenizer
        from powerclip.encoders import load

        encoder, _, tokenizer = ranks.raise_on_all(
            lambda: load(model, pretrained=pretrained, device=choose_device(device, ranks, setting="--device"))
        )
        own += _scene_jobs(scenes, encoder.image_size[0]) if scenes else []
        embeddings = target / "embeddings" if cache else None
        embedder = Embedder(encoder, CaptionTokenizer(tokenizer), embeddings, ranks=ranks)
        jobs = [_by_parts(job, score) for job in (*own, *of_suite)]
        done = evaluate(embedder, jobs, target, model=_name(model), pretrained=pretrained, again=again, quiet=quiet)
        if ranks.is_main and not quiet:
            parts = ((done.missing, "missing"), (done.failed, "failed"))
            left = [f"{len(part)} {what}" for part, what in parts if part]
            print(f"results: {target}" + (f" ({', '.join(left)})" if left else ""))
        return done


def jobs_for_paths(
    paths: Sequence[Path],
    pointing: Sequence[Path] = (),
    grounding: Sequence[Path] = (),
    images: Sequence[Path] = (),
    grid: Sequence[Path] = (),
    columns: Columns | None = None,
) -> list[Job]:
    """One job for each path of the user's own data, named after it.

    `pointing` are files of boxes, `grounding` those of captions' phrases, `grid` captioned images for mosaics. The
    images of phrases and of hard negatives are in `images`; `columns` are those of tables.
    """
    jobs: list[Job] = []
    read_own = partial(_read_path, images=images, columns=columns)
    readers: list[tuple[Path, Callable[[Path], Task]]] = [(path, read_own) for path in paths]
    readers += [(path, read_boxes) for path in pointing]
    readers += [(path, partial(read_entities, images=images)) for path in grounding]
    readers += [(path, partial(read_grid, columns=columns)) for path in grid]
    # A user's own data never pass for a dataset of the paper.
    taken = {_file_name(name) for benchmark in BENCHMARKS for name in (benchmark.name, benchmark.key)}
    for path, read in readers:
        name = next(name for name in _names(path.resolve()) if _file_name(name) not in taken)
        taken.add(_file_name(name))
        jobs.append(Job(name, _file_name(name), partial(read, path), str(path)))
    return jobs


def _by_parts(job: Job, score: ScoreSettings | None) -> Job:
    """The job scored by parts, with a result file of its own, unless the score is the global one."""
    if score is None or score.score == "global":
        return job
    return replace(job, file=f"{job.file}.{_file_name(score.name, '-')}", score=score)


def _scene_jobs(count: int, size: int) -> list[Job]:
    """The embedded scenes, drawn at the size that the model reads: their four tasks, and grounding with sets."""
    tasks: dict[str, Task] = scene_tasks(count, size) | {"grounding": scene_grounding(count, size)}

    def found(task: Task) -> Task:
        return task

    return [Job(f"scenes {name}", f"scenes_{name}", partial(found, task), "scenes") for name, task in tasks.items()]


def _read_path(path: Path, images: Sequence[Path], columns: Columns | None = None) -> Task:
    """The benchmark at a path; hard negatives find their images in `images`, where these are named."""
    if images and path.suffix.lower() == ".json":
        return read_negatives(path, images)
    return read_path(path, columns=columns)


def _names(path: Path) -> Iterator[str]:
    """What the data at a path may be called: its name, with as many folders before it as it takes, then numbered."""
    name = Path(path.name.removesuffix(".gz")).stem if path.is_file() else path.name
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
    embedder: Embedder,
    jobs: Sequence[Job],
    output: Path,
    *,
    model: str,
    pretrained: str | None = None,
    again: bool = False,
    quiet: bool = False,
    console: Console | None = None,
) -> Evaluated:
    """Evaluate a model on datasets, one result file for each below `output`.

    Args:
        embedder: the model, with its cache and its ranks; the main one prints and writes.
        jobs: the datasets.
        output: the folder of the results.
        model: what the results call the model.
        pretrained: its weights, where the model is an open_clip name.
        again: measure finished published datasets again. A user's own are always read again: they may have
            changed, and what has not is in the cache.
        quiet: print nothing.
        console: where to print; standard output by default.

    Raises:
        UserError: no dataset could be evaluated.
    """
    ranks = embedder.ranks
    console = console or Console()
    quiet = quiet or not ranks.is_main
    done = Evaluated({}, {}, {})
    for number, job in enumerate(jobs, 1):
        name = job.name if job.score is None else f"{job.name}, {job.score.name}"
        head = f"[{number:{len(str(len(jobs)))}d}/{len(jobs)}] {name}: "
        path = output / f"{job.file}.json"
        previous = None
        if job.fixed and not again:
            previous = ranks.broadcast(partial(_finished, path, embedder.digest.hex(), job))
        try:
            with Progress(head, unit="images", quiet=quiet, console=console, transient=True) as progress:
                embedder.on_progress = progress.update
                records = previous or _measure(job, embedder, model, pretrained)
        except MissingError as error:
            done.missing[job.file] = str(error)
            line = f"missing; {error}"
        except UserError as error:
            done.failed[job.file] = str(error)
            line = f"failed; {error}"
        else:
            if previous is None and ranks.is_main:
                content = records[0] if len(records) == 1 else records
                write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
            done.results[job.file] = records
            line = describe(records) + (" (finished before)" if previous else "")
        if not quiet:
            print_line(console, head + line)
    ranks.raise_on_all(partial(_check_results, done))
    return done


def describe(records: Sequence[dict[str, Any]]) -> str:
    """The metrics of a result in one line, in percent; of a part, such as SugarCrepe's kinds, its accuracy."""
    shown: dict[str, float | None] = {}
    for record in records:
        is_total = len(records) == 1 or "mean_kind_acc" in record["metrics"]
        shown |= record["metrics"] if is_total else {record["dataset"].rpartition("/")[2]: record["metrics"]["acc"]}
    error = shown.pop("acc_standard_error", None)
    parts = [
        f"{_short(name)} {100 * value:.1f}" + (f" ± {100 * error:.1f}" if name == "acc" and error is not None else "")
        for name, value in shown.items()
        if value is not None
    ]
    is_grounding = records[0]["task"] == Grounding.task
    if is_grounding:
        parts = _grounding_parts(shown)
    corrupt = records[0]["powerclip"]["corrupt"]
    notes = [f"{len(corrupt)} unreadable: {', '.join(corrupt[:3])}"] if corrupt else []
    counts = records[0]["powerclip"]["counts"]
    missing, small = counts.get("missing"), counts.get("too small")
    what = "captions" if is_grounding else "comparisons"
    notes += [f"{missing:,} {what} left out: their images are not there"] if missing else []
    notes += [f"{small:,} of {counts['phrases']:,} boxes lie between the centres of patches"] if small else []
    if is_grounding and (without := counts["phrases"] - counts["phrases with sets"]):
        notes.append(f"no sets for {without:,} phrases of images with one box or more than {Grounding.most_regions}")
    notes += [records[0]["powerclip"]["note"]] if "note" in records[0]["powerclip"] else []
    return " · ".join(parts) + (f" ({'; '.join(notes)})" if notes else "")


def _grounding_parts(metrics: Mapping[str, float | None]) -> list[str]:
    """The metrics of grounding that tell most, of phrases in their caption / alone, beside their baselines."""

    def shown(*names: str) -> str:
        values = (metrics.get(name) for name in names)
        return " / ".join("–" if value is None else f"{100 * value:.1f}" for value in values)

    def both(name: str) -> str:
        return shown(*(name.format(query) for query in ("words", "text")))

    sets = [
        f"set F1, {number} {both(f'set_f1_{{}}_{which}')} "
        f"(best box {both(f'set_f1_{{}}_best_box_{which}')}, relative {both(f'set_f1_{{}}_relative_{which}')}, "
        f"all boxes {shown(f'set_f1_all_boxes_{which}')})"
        for which, number in (("single", "one box"), ("several", "several boxes"))
    ]
    return [
        f"pointing in caption / alone {both('pointing_{}')} (chance {shown('pointing_chance')}, "
        f"fixed patch {shown('pointing_fixed_patch')}, another image's phrase {both('pointing_{}_other')}), "
        f"relative to the image's other phrases {both('pointing_{}_relative')}",
        f"swap {both('swap_{}')} (order alone {shown('swap_by_order')}), balanced {both('swap_{}_balanced')} "
        f"(order alone {shown('swap_by_order_balanced')})",
        *sets,
    ]


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


def _own_jobs(
    paths: Sequence[Path],
    pointing: Sequence[Path],
    grounding: Sequence[Path],
    images: Sequence[Path],
    grid: Sequence[Path],
    suite: str | None,
    columns: Columns | None,
    any_other: bool,
) -> list[Job]:
    """The jobs of the user's own data; there may be none beside a suite, or beside any other."""
    if suite is None and not any_other and not paths and not pointing and not grounding and not grid:
        raise UserError("say what to evaluate on: paths of your own data, or --suite NAME --data FOLDER")
    if grounding and not images:
        raise UserError("--grounding needs --images: phrases with boxes, and tars or a folder of their images")
    if images and not grounding and not any(path.suffix.lower() == ".json" for path in paths):
        raise UserError("--images belongs to --grounding, or to a .json of hard negatives")
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder {path}")
    for option, several in (("--images", images), ("--grid", grid)):
        for path in several:
            if not path.exists():
                raise UserError(f"{option}: there is no file or folder {path}")
    for option, files in (("--pointing", pointing), ("--grounding", grounding)):
        for path in files:
            if not path.is_file():
                raise UserError(f"{option}: there is no file {path}")
    return jobs_for_paths(paths, pointing, grounding, images, grid, columns)


def _suite_jobs(suite: str | None, data: Path | None, datasets: Sequence[str]) -> list[Job]:
    if suite is None:
        if data is not None or datasets:
            raise UserError("--data and --datasets belong to a suite: name it with --suite")
        return []
    benchmarks = choose(suite, datasets)
    if data is None:
        raise UserError("--suite needs --data, the folder that holds its datasets")
    if not data.is_dir():
        raise UserError(f"--data: there is no folder {data}")
    return jobs_for_suite(benchmarks, data)


def _name(model: str) -> str:
    """What results call a model: a folder by its last two names, without a last `model`, which every run has."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    path = path.resolve()
    path = path.parent if path.name == "model" else path
    return "/".join(path.parts[-2:]).lstrip("/")


def _measure(job: Job, embedder: Embedder, model: str, pretrained: str | None) -> list[dict[str, Any]]:
    started = time.perf_counter()
    task = _find(job, embedder.ranks)
    scored = embedder.ranks.raise_on_all(partial(_score, task, embedder, job.score))
    about = {
        "counts": scored.counts,
        "corrupt": list(scored.corrupt),
        "seconds": round(time.perf_counter() - started, 3),
        "weights": embedder.digest.hex(),
        "data": job.where,
    }
    if job.score is not None:
        about["score"] = job.score.about
    if isinstance(task, CaptionRetrieval) and task.note:
        about["note"] = task.note
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


def _score(task: Task, embedder: Embedder, settings: ScoreSettings | None) -> Scored:
    return task.score(embedder) if settings is None else score_by_parts(task, embedder, settings)


def _find(job: Job, ranks: Ranks) -> Task:
    """The task of a job. Where one rank does not find it, all raise the same, so that none waits for another."""
    missing = ""

    def find() -> Task | None:
        nonlocal missing
        try:
            return job.find()
        except MissingError as error:
            missing = str(error)
            return None

    task = ranks.raise_on_all(find)
    reasons = [reason for reason in ranks.collect(missing) if reason]
    if reasons or task is None:
        raise MissingError(reasons[0])
    return task


def _check_results(done: Evaluated) -> None:
    if not done.results:
        reasons = [*done.failed.values(), *done.missing.values()]
        raise UserError(f"no dataset could be evaluated: {reasons[0] if reasons else 'none was named'}")


def _finished(path: Path, digest: str, job: Job) -> list[dict[str, Any]] | None:
    """The results of an earlier run, if it was of the same weights and the same data, by the same score."""
    if not path.is_file():
        return None
    try:
        records = read_records(path)
    except UserError:
        return None
    score = None if job.score is None else job.score.about
    same = all(
        record.get("powerclip", {}).get("weights") == digest
        and record["powerclip"].get("data") == job.where
        and record["powerclip"].get("score") == score
        for record in records
    )
    return records if same else None


def _file_name(name: str, joint: str = "_") -> str:
    return re.sub(r"[^\w.-]+", joint, name)


def _short(name: str) -> str:
    shown = {
        "image_retrieval_recall": "image R",
        "text_retrieval_recall": "text R",
        "mean_recall": "mean recall",
        "mean_kind_acc": "mean of kinds",
        "mean_average_precision": "mAP",
        "pointing_words": "in caption",
        "pointing_text": "alone",
        "pointing_chance": "chance",
        "grid_words": "in caption",
        "grid_words_hit": "highest patch in caption",
        "grid_text": "alone",
        "grid_text_hit": "highest patch alone",
        "grid_chance": "chance",
        "mean_image_acc": "mean image",
        "centred_acc": "without it",
    }
    head, at, rest = name.partition("@")
    return f"{shown.get(head, head)}{at}{rest}"
