"""Shards over the processes of this machine. A process that dies is replaced, and its shard begun again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import Outcome, State
from powerclip.annotate.stop import Stop
from powerclip.runtime.processes import ProcessPool, Report, WorkerFunction

_OFTEN = 0.2  # seconds between two messages on how far a shard is

OnSamples = Callable[[str, int, int], None]  # shard, samples done since the last call, samples of the shard


def run_local(shards: Sequence[str], job: Job, workers: int, stop: Stop, on_samples: OnSamples) -> Iterator[Outcome]:
    """The outcomes of the shards, as they are finished. One worker is this process itself."""
    if workers == 1 or len(shards) == 1:
        annotator = job.load()
        for shard in shards:
            if stop:
                return
            yield annotator.annotate(shard, partial(on_samples, shard))
        return
    pool: ProcessPool[str, Outcome] = ProcessPool(partial(_load, job), min(workers, len(shards)))
    try:
        for shard, outcome in pool.run(shards, lambda: stop.asked, lambda shard, message: on_samples(shard, *message)):
            yield outcome or Outcome(shard, State.FAILED, reason="every process that tried it died")
    finally:
        pool.close()


def _load(job: Job, number: int, count: int) -> WorkerFunction[str, Outcome]:
    annotator = job.load(number, count)
    return lambda shard, report: annotator.annotate(shard, _Messages(report))


class _Messages:
    """Tells the parent how far a shard is, not too often."""

    def __init__(self, report: Report):
        self._report, self._done, self._last = report, 0, time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        self._done += done
        if time.monotonic() - self._last >= _OFTEN:
            self._report((self._done, of))
            self._done, self._last = 0, time.monotonic()
