"""The end of a study: the models of all runs on held-out data, measured as `powerclip evaluate` measures them.

What a run has scored is kept in its folder as `test.json`, by a hash of the data, and counts as long as the run's
results are those that it was measured beside: a run that is trained again is measured again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from powerclip.compare.study import RunFailure, Study, StudyResults
from powerclip.compare.table import (
    Measure,
    describe_seeds,
    failures,
    markdown_page,
    measure_table,
    study_table,
    summary,
)
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder, OnProgress, PixelStore
from powerclip.evaluate.images import ImageSource
from powerclip.evaluate.metrics import CUTOFFS
from powerclip.evaluate.runner import jobs_for_paths
from powerclip.evaluate.tasks import Scored, Task
from powerclip.report.table import fixed
from powerclip.runtime.distributed import choose_device
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress, duration, print_line
from powerclip.train.results import Results
from powerclip.train.run_folder import RunFolder

DIGITS = 2  # differences at the end of a study are small
# Metrics with labels of their own, in the order of the table.
LABELS = {
    "mean_recall": "mean recall",
    "mean_recall@1": "R@1",
    **{f"{side}_retrieval_recall@{k}": f"R@{k} {side}" for side in ("text", "image") for k in CUTOFFS},
    "acc": "accuracy",
    "mean_kind_acc": "mean of kinds",
}
HEADLINES = ("mean_recall", "mean_recall@1", "acc1", "mean_average_precision", "acc")


@dataclass(frozen=True)
class HeldOut:
    """Data that no setting was chosen by."""

    name: str
    path: str
    task: Task
    digest: str  # of captions, labels and images, wherever they lie

    @property
    def about(self) -> str:
        """`test-000 (1,000 images, 5,000 captions)`."""
        return f"{self.name} ({self.task.summary})"


def read_held_out(paths: Sequence[Path]) -> list[HeldOut]:
    """What lies at the paths, named as `powerclip evaluate` names it.

    Raises:
        UserError: a path does not exist or cannot be read, or two have the same name.
    """
    for path in paths:
        if not path.exists():
            raise UserError(f"--test: there is no file or folder {path}")
    held_out: list[HeldOut] = []
    for job in jobs_for_paths(list({path.resolve(): path for path in paths}.values())):
        if any(data.name == job.name for data in held_out):
            raise UserError(f"--test: two paths are called {job.name}; rename one")
        task = job.find()
        held_out.append(HeldOut(job.name, job.where, task, _digest(task)))
    return held_out


def measure_held_out(
    study: Study,
    output: Path,
    results: StudyResults,
    held_out: Sequence[HeldOut],
    *,
    quiet: bool = False,
    console: Console | None = None,
) -> StudyResults:
    """Measure the models of a study's runs, and write `test.md` and `test.json`.

    Args:
        study: what was compared.
        output: its folder.
        results: the results of its runs. Those that failed are listed and left out.
        held_out: what to measure on.
        quiet: print only the table.
        console: where to print; standard output by default.

    Returns:
        The results, with the held-out scores instead of the runs' own: `NAME/metric`.

    Raises:
        UserError: no model could be measured.
    """
    console = console or Console()

    def say(text: str) -> None:
        if not quiet:
            print_line(console, text)

    say(f"Held-out data: {', '.join(data.about for data in held_out)}")
    tester = _Tester(held_out)
    tested: StudyResults = {setting.name: {} for setting in study.settings}
    corrupt: dict[str, list[str]] = {}
    runs = study.runs(output, list(results[study.baseline]))
    for number, run in enumerate(runs, 1):
        head = f"[{number:{len(str(len(runs)))}d}/{len(runs)}] {run.setting}, seed {run.seed}: "
        result = results[run.setting][run.seed]
        if isinstance(result, RunFailure):
            tested[run.setting][run.seed] = result
            say(f"{head}left out, its run failed")
            continue
        started = time.perf_counter()
        try:
            with Progress(head, unit="images", quiet=quiet, console=console, transient=True) as progress:
                scored, measured_now = tester.measure(run.folder, progress.update)
        except UserError as error:
            tested[run.setting][run.seed] = RunFailure(str(error))
            say(f"{head}failed: {error}")
            continue
        scores = {f"{name}/{metric}": value for name, one in scored.items() for metric, value in one.flat().items()}
        held_out_result = replace(result, scores=scores, last={})
        tested[run.setting][run.seed] = held_out_result
        corrupt |= {name: list(one.corrupt) for name, one in scored.items() if one.corrupt}
        note = duration(time.perf_counter() - started) if measured_now else "measured before"
        say(f"{head}{_describe(held_out, held_out_result)}  ({note})")
    ended = [result for by_seed in tested.values() for result in by_seed.values()]
    reasons = [result.reason for result in ended if isinstance(result, RunFailure)]
    if len(reasons) == len(runs):
        raise UserError(f"no model could be measured on the held-out data; the first: {reasons[0]}")
    _write(study, output, tested, held_out, corrupt)
    headlines = [measure for measure in _measures(held_out, tested) if _metric(held_out, measure.key)[1] in HEADLINES]
    study_table(study, tested, headlines, time=False).print(console)
    for line in failures(tested):
        print_line(console, line, style="yellow")
    say(f"Table and numbers of the held-out data: {output / 'test.md'}, test.json")
    return tested


class _Tester:
    """Measures one model after the other on the same data, which are decoded once."""

    def __init__(self, held_out: Sequence[HeldOut]) -> None:
        self._held_out = held_out
        self._device = choose_device("auto")
        self._pixels = PixelStore()

    def measure(self, folder: RunFolder, on_progress: OnProgress) -> tuple[dict[str, Scored], bool]:
        """The scores of a run's model on each dataset, and whether any of them had to be measured now."""
        path, run = folder.root / "test.json", hashlib.blake2b(folder.results.read_bytes(), digest_size=16).hexdigest()
        records = _read_records(path, run)
        missing = [data for data in self._held_out if data.digest not in records]
        if missing:
            from powerclip.data.tokens import CaptionTokenizer
            from powerclip.encoders import load

            encoder, _, tokenizer = load(folder.model, device=self._device)
            embedder = Embedder(encoder, CaptionTokenizer(tokenizer), pixels=self._pixels)
            embedder.on_progress = on_progress
            for data in missing:
                records[data.digest] = {"name": data.name, "path": data.path, **asdict(data.task.score(embedder))}
            write_atomic(path, (json.dumps({"run": run, "data": records}, indent=1) + "\n").encode())
        scored = {}
        for data in self._held_out:
            record = records[data.digest]
            scored[data.name] = Scored(record["parts"], record["counts"], tuple(record["corrupt"]))
        return scored, bool(missing)


def _read_records(path: Path, run: str) -> dict[str, dict[str, Any]]:
    """Digest of the data → the scores of this run on them; empty for a run that was trained again since."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["data"]) if content["run"] == run else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _digest(task: Task) -> str:
    """A hash of everything but the model that a score depends on."""
    total = hashlib.blake2b(type(task).__name__.encode(), digest_size=16)
    assert is_dataclass(task)  # as all tasks are
    for part in fields(task):
        value = getattr(task, part.name)
        if part.name == "images":
            with ThreadPoolExecutor() as pool:
                for digest in pool.map(lambda number, images=value: _hash(images, number), range(len(value.names))):
                    total.update(digest)
        else:
            plain = value.tolist() if isinstance(value, Tensor) else value
            total.update(json.dumps([part.name, plain]).encode())
    return total.hexdigest()


def _hash(images: ImageSource, number: int) -> bytes:
    content = b""
    with suppress(OSError, ValueError):  # counted as unreadable when it is embedded
        content = images.read(number)
    return hashlib.blake2b(content, digest_size=16).digest()


def _metric(held_out: Sequence[HeldOut], key: str) -> tuple[str, str]:
    """Name of the data and metric of a score: `sugarcrepe/swap_obj/acc` → `sugarcrepe`, `swap_obj/acc`."""
    name = max((data.name for data in held_out if key.startswith(f"{data.name}/")), key=len)
    return name, key.removeprefix(f"{name}/")


def _measures(held_out: Sequence[HeldOut], tested: StudyResults) -> list[Measure]:
    """Everything that was measured, `NAME: what`, dataset by dataset, the main metrics first."""
    finished = [result for runs in tested.values() for result in runs.values() if isinstance(result, Results)]
    keys = dict.fromkeys(key for result in finished for key in result.scores)
    metrics: dict[str, list[str]] = {data.name: [] for data in held_out}
    for key in keys:
        name, metric = _metric(held_out, key)
        if metric not in ("acc_standard_error", "mean_image_acc", "centred_acc"):  # they say how to read `acc`
            metrics[name].append(metric)
    return [measure for name, names in metrics.items() for measure in _ordered(name, names)]


def _ordered(name: str, metrics: Iterable[str]) -> list[Measure]:
    sides = tuple(f"{side}_retrieval_recall@1" for side in ("text", "image"))
    measured = [*metrics, *(["mean_recall@1"] if set(sides) <= set(metrics) else [])]
    order = {metric: number for number, metric in enumerate(LABELS)}
    measured.sort(key=lambda metric: order.get(metric, len(order)))
    return [
        Measure(
            f"{name}/{metric}",
            f"{name}: {LABELS.get(metric, metric.removesuffix('/acc'))}",
            over=tuple(f"{name}/{side}" for side in sides) if metric == "mean_recall@1" else (),
        )
        for metric in measured
    ]


def _describe(held_out: Sequence[HeldOut], result: Results) -> str:
    """`test-000: mean recall 12.7, R@1 4.6 · sugarcrepe: accuracy 55.3`."""
    shown: dict[str, list[str]] = {}
    for measure in _measures(held_out, {"": {0: result}}):
        name, metric = _metric(held_out, measure.key)
        if metric in HEADLINES:
            shown.setdefault(name, []).append(f"{LABELS.get(metric, metric)} {fixed(measure.value(result))}")
    return " · ".join(f"{name}: {', '.join(parts)}" for name, parts in shown.items())


def _write(
    study: Study, output: Path, tested: StudyResults, held_out: Sequence[HeldOut], corrupt: dict[str, list[str]]
) -> None:
    measures = _measures(held_out, tested)
    seeds = list(tested[study.baseline])
    legend = (
        f"Percent, mean ± standard deviation over seeds; Δ is the mean difference to {study.baseline} ± its standard "
        "error over the seeds that both have, with the ratio and the p-value of a paired t-test. Mean recall is that "
        "of R@1, 5 and 10 both ways, R@1 the mean of both ways; text: captions are retrieved for an image, image: "
        "images for a caption. Accuracy is that of all comparisons together."
    )
    footer = [
        f"Held-out data: {', '.join(data.about for data in held_out)}.",
        f"{describe_seeds(seeds)}; {machine()}.",
        *(f"- {name}: {len(which):,} unreadable: {', '.join(which[:3])}" for name, which in corrupt.items()),
        *failures(tested),
    ]
    table = measure_table(study, tested, measures, corner="held-out", digits=DIGITS)
    write_atomic(output / "test.md", markdown_page(study, table, legend, "\n".join(footer)).encode())
    content = {
        "about": study.about,
        "baseline": study.baseline,
        "seeds": seeds,
        "machine": machine(),
        "data": {
            data.name: {"path": data.path, "digest": data.digest, "corrupt": corrupt.get(data.name, [])}
            for data in held_out
        },
        "settings": {
            setting.name: {
                "about": setting.about,
                "summary": summary(study, tested, setting.name, measures),
                "runs": {
                    str(seed): {"error": result.reason} if isinstance(result, RunFailure) else {"scores": result.scores}
                    for seed, result in tested[setting.name].items()
                },
            }
            for setting in study.settings
        },
    }
    write_atomic(output / "test.json", (json.dumps(content, indent=1) + "\n").encode())
