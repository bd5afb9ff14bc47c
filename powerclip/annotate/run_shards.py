"""`powerclip annotate trees|regions`: all shards, over processes of this machine or a Ray cluster, and a summary."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import OnSamples, ShardResult, State
from powerclip.annotate.shard_list import check_names
from powerclip.annotate.writer import remove_abandoned
from powerclip.data.sidecar import sidecar_path
from powerclip.errors import UserError, nearest
from powerclip.runtime.processes import ProcessPool, Report, WorkerFunction
from powerclip.runtime.progress import Progress

ENGINES = ["local", "ray"]

_REPORT_EVERY = 0.2  # seconds between two messages on how far a shard is
_LINE_EVERY = 10.0  # seconds between two lines of progress where there is no terminal


@dataclass
class Summary:
    """What a run over all shards gave."""

    shards: Counter[State] = field(default_factory=Counter)
    samples: int = 0  # of shards that were annotated, not those done already
    kept: int = 0
    items: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    stale: Counter[str] = field(default_factory=Counter)  # shards that were annotated again, by reason
    failed: dict[str, str] = field(default_factory=dict)  # shard → reason
    damaged: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    def add(self, result: ShardResult) -> None:
        """Count one shard."""
        self.shards[result.state] += 1
        if result.state in (State.NEW, State.REDONE):
            self.samples += result.samples
            self.kept += result.kept
            self.items += result.items
            self.fallbacks.update(result.fallbacks)
        if result.state is State.REDONE:
            self.stale[result.reason or "stale"] += 1
        if result.state is State.FAILED:
            self.failed[result.shard] = result.reason or "unknown"
        elif result.damage:
            self.damaged[result.shard] = result.damage

    def lines(self, job: Job) -> Iterator[str]:
        """The summary, to be printed."""
        counts = {state: self.shards[state] for state in State}
        states = [f"{_count(count, 'shard')} {state}" for state, count in counts.items() if count]
        yield f"{job.kind}: {', '.join(states) or 'nothing to do'}"
        if self.samples:
            items = "captions" if job.kind == "trees" else "masks"
            kept = f", {self.kept:,} of them unchanged and kept" if self.kept else ""
            yield f"  {_count(self.samples, 'sample')} with {self.items:,} {items}{kept}"
        if self.fallbacks:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.fallbacks.most_common())
            yield f"  {'flat trees' if job.kind == 'trees' else 'without masks'}: {reasons}"
        for reason, count in self.stale.most_common():
            yield f"  annotated again: {_count(count, 'shard')}, {reason}"


def annotate(
    shards: Sequence[str],
    job: Job,
    *,
    workers: int | None = None,
    engine: str = "local",
    address: str | None = None,
    quiet: bool = False,
) -> Summary:
    """Bring the sidecars of shards up to date.

    Args:
        shards: tars, see `powerclip.annotate.shard_list.list_shards`.
        job: what to annotate them with.
        workers: processes or actors; one for each core, or for each GPU when there are some, by default.
        engine: `local`, processes of this machine, or `ray`.
        address: of a Ray cluster; without it Ray starts on this machine.
        quiet: print what is wrong only.

    Raises:
        UserError: an option is wrong, or a sidecar cannot be written.
        KeyboardInterrupt: at the second Ctrl-C.
    """
    if engine not in ENGINES:
        raise UserError(f"--engine: {engine!r} is none{nearest(engine, ENGINES)}; there are {', '.join(ENGINES)}")
    if address is not None and engine != "ray":
        raise UserError("--address is for --engine ray")
    job.check()
    check_names(shards, job.sidecars)
    for folder in {sidecar_path(shard, job.kind, job.sidecars).parent for shard in shards}:
        if job.sidecars is not None:
            _make_folder(folder)
        if folder.is_dir():
            remove_abandoned(folder)
    summary = Summary()
    bar = Progress(job.kind, len(shards), unit="shards", every=_LINE_EVERY, quiet=quiet)
    with bar, StopOnInterrupt(bar.say) as stop:
        progress = ShardProgress(bar)
        if engine == "ray":
            from powerclip.annotate.engine_ray import run_ray

            results = run_ray(shards, job, workers, stop, progress.on_samples, address)
        else:
            results = run_local(shards, job, workers or job.default_workers(), stop, progress.on_samples)
        for result in results:
            summary.add(result)
            progress.on_result(result)
        summary.interrupted = stop() and sum(summary.shards.values()) < len(shards)
    for line in summary.lines(job):
        bar.say(line)
    return summary


def exit_code(summary: Summary) -> int:
    """130 after Ctrl-C, 1 when a shard failed, else 0; what failed is printed."""
    for shard, reason in summary.failed.items():
        print(f"powerclip: {shard}: {reason}", file=sys.stderr)
    for shard, damage in summary.damaged.items():
        print(f"powerclip: {shard}: {damage}; annotated up to there", file=sys.stderr)
    return 130 if summary.interrupted else 1 if summary.failed else 0


class StopOnInterrupt:
    """Whether to stop after the shards that have begun: true after the first Ctrl-C; the second raises."""

    def __init__(self, say: Callable[[str], None] = print):
        self._say = say
        self._before: signal._HANDLER = None
        self._interrupted = False

    def __call__(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._interrupted

    def __enter__(self) -> StopOnInterrupt:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        self._say("stopping after the shards that have begun; Ctrl-C again to stop at once")


class ShardProgress:
    """Shows how far a run over shards is: finished shards, parts of those that have begun, samples a second."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._finished = 0  # shards
        self._annotated = 0  # samples
        self._begun: dict[str, tuple[int, int]] = {}  # shard → samples done, samples in all

    def on_samples(self, shard: str, done: int, total: int) -> None:
        """Count samples of a shard that were annotated since the last call."""
        before = self._begun.get(shard, (0, total))[0]
        self._begun[shard] = before + done, total
        self._annotated += done
        self._show()

    def on_result(self, result: ShardResult) -> None:
        """Count a shard that is finished."""
        reported, _ = self._begun.pop(result.shard, (0, 0))
        self._finished += 1
        if result.state in (State.NEW, State.REDONE):
            self._annotated += result.samples - reported
        else:
            self._annotated -= reported
            self._progress.skip(1)
        self._show()

    def _show(self) -> None:
        rate = self._annotated / max(1e-9, self._progress.elapsed)
        part = sum(done / max(1, total) for done, total in self._begun.values())
        self._progress.update(self._finished, f"{self._annotated:,} samples  {rate:,.0f}/s", partial=part)


# ---- processes of this machine ---------------------------------------------------------------------------------------


def run_local(
    shards: Sequence[str], job: Job, workers: int, stop: Callable[[], bool], on_samples: OnSamples
) -> Iterator[ShardResult]:
    """The results of the shards, as they are finished. One worker is this process itself."""
    if workers == 1 or len(shards) == 1:
        annotator = job.load()
        for shard in shards:
            if stop():
                return
            yield annotator.annotate(shard, partial(on_samples, shard))
        return
    pool: ProcessPool[str, ShardResult] = ProcessPool(partial(_load_worker, job), min(workers, len(shards)))
    try:
        for shard, result in pool.run(shards, stop, lambda shard, message: on_samples(shard, *message)):
            yield result or ShardResult(shard, State.FAILED, reason="every process that tried it died")
    finally:
        pool.close()


def _load_worker(job: Job, number: int, count: int) -> WorkerFunction[str, ShardResult]:
    annotator = job.load(number, count)
    return lambda shard, report: annotator.annotate(shard, _ThrottledReport(report))


class _ThrottledReport:
    """Reports to the parent process how far a shard is, not too often."""

    def __init__(self, report: Report):
        self._report, self._done, self._last = report, 0, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        self._done += done
        if time.monotonic() - self._last >= _REPORT_EVERY:
            self._report((self._done, total))
            self._done, self._last = 0, time.monotonic()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--sidecars {folder}: {error.strerror}") from None


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
