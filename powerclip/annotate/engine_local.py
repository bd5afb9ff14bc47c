"""Shards over the processes of this machine. A process that dies is replaced, and its shard begun again."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import Outcome, State
from powerclip.annotate.stop import Stop
from powerclip.errors import UserError

ATTEMPTS = 3  # at a shard on which processes die
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
    crew = _Crew(job, min(workers, len(shards)))
    try:
        yield from crew.run(shards, stop, on_samples)
    finally:
        crew.close()


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    shard: str | None = None


class _Crew:
    """Processes that take one shard at a time."""

    def __init__(self, job: Job, count: int):
        self._job, self._count = job, count
        # A fork would share the parent's threads and GPU, which neither survives.
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._start(number) for number in range(count)]

    def run(self, shards: Sequence[str], stop: Stop, on_samples: OnSamples) -> Iterator[Outcome]:
        """Hand out shards until none is left, or until `stop` is asked for."""
        waiting, deaths = deque(shards), Counter[str]()
        while True:
            for worker in self._workers:
                if worker.shard is None and waiting and not stop:
                    self._hand(worker, waiting.popleft())
            busy = [worker for worker in self._workers if worker.shard is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], timeout=0.5)  # Ctrl-C is seen when it returns
            for worker in busy:
                if worker.pipe not in ready:
                    continue
                shard = worker.shard
                assert shard is not None
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    deaths[shard] += 1
                    self._replace(worker)
                    if deaths[shard] >= ATTEMPTS:
                        yield Outcome(shard, State.FAILED, reason="every process that tried it died")
                    elif not stop:
                        waiting.appendleft(shard)
                    continue
                if isinstance(message, Outcome):
                    worker.shard = None
                    yield message
                elif isinstance(message, BaseException):
                    raise message
                else:
                    on_samples(shard, *message)

    def close(self) -> None:
        """End the processes: those that wait leave, those that work are stopped."""
        for worker in self._workers:
            if worker.shard is None:
                worker.pipe.close()
            else:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join()

    def _start(self, number: int) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_work, args=(there, self._job, number, self._count), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def _hand(self, worker: _Worker, shard: str) -> None:
        worker.shard = shard
        with suppress(OSError):  # it has died while it waited: seen, and dealt with, when its answer is read
            worker.pipe.send(shard)

    def _replace(self, worker: _Worker) -> None:
        worker.process.join()
        fresh = self._start(self._workers.index(worker))
        worker.process, worker.pipe, worker.shard = fresh.process, fresh.pipe, None


def _work(pipe: Connection, job: Job, number: int, count: int) -> None:
    """Annotate the shards that come through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        annotator = job.load(number, count)
        while True:
            try:
                shard = pipe.recv()
            except EOFError:
                return
            pipe.send(annotator.annotate(shard, _Messages(pipe)))
    except UserError as error:
        pipe.send(UserError(str(error)))
    except BrokenPipeError:
        return  # the parent is gone
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        pipe.send(RuntimeError(f"a worker failed: {type(error).__name__}: {error}"))


class _Messages:
    """Tells the parent how far a shard is, not too often."""

    def __init__(self, pipe: Connection):
        self._pipe, self._done, self._last = pipe, 0, time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        self._done += done
        if time.monotonic() - self._last >= _OFTEN:
            self._pipe.send((self._done, of))
            self._done, self._last = 0, time.monotonic()
