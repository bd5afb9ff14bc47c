"""`powerclip annotate trees|regions`: all shards, with a bar, a tally and a clean end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import Outcome, State
from powerclip.annotate.shard_list import check_names
from powerclip.annotate.shard_progress import Progress
from powerclip.annotate.stop import Stop
from powerclip.annotate.writer import sweep
from powerclip.data.sidecar import sidecar_path
from powerclip.errors import UserError, nearest

ENGINES = ["local", "ray"]


@dataclass
class Tally:
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

    def add(self, outcome: Outcome) -> None:
        """Count one shard."""
        self.shards[outcome.state] += 1
        if outcome.state in (State.NEW, State.REDONE):
            self.samples += outcome.samples
            self.kept += outcome.kept
            self.items += outcome.items
            self.fallbacks.update(outcome.fallbacks)
        if outcome.state is State.REDONE:
            self.stale[outcome.reason or "stale"] += 1
        if outcome.state is State.FAILED:
            self.failed[outcome.shard] = outcome.reason or "unknown"
        elif outcome.damage:
            self.damaged[outcome.shard] = outcome.damage

    def lines(self, job: Job) -> Iterator[str]:
        """What the person who started the run wants to know."""
        counts = {state: self.shards[state] for state in State}
        told = [f"{_count(count, 'shard')} {state}" for state, count in counts.items() if count]
        yield f"{job.kind}: {', '.join(told) or 'nothing to do'}"
        if self.samples:
            what = "captions" if job.kind == "trees" else "masks"
            kept = f", {self.kept:,} of them unchanged and kept" if self.kept else ""
            yield f"  {_count(self.samples, 'sample')} with {self.items:,} {what}{kept}"
        if self.fallbacks:
            fallen = ", ".join(f"{count:,} {reason}" for reason, count in self.fallbacks.most_common())
            yield f"  {'flat trees' if job.kind == 'trees' else 'without masks'}: {fallen}"
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
) -> Tally:
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
            _make(folder)
        if folder.is_dir():
            sweep(folder)
    tally = Tally()
    with Progress(job.kind, len(shards), quiet=quiet) as progress, Stop(progress.say) as stop:
        for outcome in _outcomes(shards, job, workers, engine, address, stop, progress):
            tally.add(outcome)
            progress.finished(outcome)
        tally.interrupted = bool(stop) and sum(tally.shards.values()) < len(shards)
    for line in tally.lines(job):
        progress.say(line)
    return tally


def _outcomes(
    shards: Sequence[str],
    job: Job,
    workers: int | None,
    engine: str,
    address: str | None,
    stop: Stop,
    progress: Progress,
) -> Iterator[Outcome]:
    if engine == "ray":
        from powerclip.annotate.engine_ray import run_ray

        return run_ray(shards, job, workers, stop, progress.samples, address)
    from powerclip.annotate.engine_local import run_local

    return run_local(shards, job, workers or job.default_workers(), stop, progress.samples)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--sidecars {folder}: {error.strerror}") from None


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def exit_code(tally: Tally) -> int:
    """130 after Ctrl-C, 1 when a shard failed, else 0."""
    for shard, reason in tally.failed.items():
        print(f"powerclip: {shard}: {reason}", file=sys.stderr)
    for shard, damage in tally.damaged.items():
        print(f"powerclip: {shard}: {damage}; annotated up to there", file=sys.stderr)
    return 130 if tally.interrupted else 1 if tally.failed else 0
