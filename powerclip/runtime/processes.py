"""A pool of processes on this machine. A worker that dies is replaced, and its task is started again."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from powerclip.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[Any], None]  # sends a progress message to the parent
WorkerFunction = Callable[[Task, Report], Result]

ATTEMPTS = 3  # at a task whose worker dies


@dataclass
class _Worker(Generic[Task]):
    process: BaseProcess
    pipe: Connection
    task: Task | None = None


class ProcessPool(Generic[Task, Result]):
    """Processes that take one task at a time.

    Args:
        load: called once in each process with its number and the number of processes; returns the function that does a
            task. It is sent to the process, as are tasks, results and reports: all must be picklable, tasks hashable.
        count: the largest number of processes; one is started when there is a task for it.
        daemon: whether Python ends them with this process if `close` is not called; daemons cannot start processes.
    """

    def __init__(self, load: Callable[[int, int], WorkerFunction[Task, Result]], count: int, *, daemon: bool = True):
        self._load, self._count, self._daemon = load, count, daemon
        # Neither the parent's threads nor its GPU context survive a fork.
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker[Task]] = []

    def run(
        self, tasks: Iterable[Task], stop: Callable[[], bool], on_report: Callable[[Task, Any], None]
    ) -> Iterator[tuple[Task, Result | None]]:
        """The result of each task as it ends; None for a task on which `ATTEMPTS` workers died.

        `stop` is called twice a second; once it returns true, no further task begins. `on_report` gets the workers'
        progress messages.

        Raises:
            UserError: a worker's own.
            RuntimeError: a worker failed.
        """
        waiting, deaths = deque(tasks), Counter[Task]()
        while True:
            stopping = stop()
            while waiting and not stopping and (idle := self._idle_worker()):
                self._assign(idle, waiting.popleft())
            busy = [worker for worker in self._workers if worker.task is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], timeout=0.5)  # a signal is seen when it returns
            for worker in busy:
                if worker.pipe not in ready:
                    continue
                task = worker.task
                assert task is not None
                try:
                    kind, message = worker.pipe.recv()
                except (EOFError, OSError):
                    deaths[task] += 1
                    self._replace(worker)
                    if deaths[task] >= ATTEMPTS:
                        yield task, None
                    elif not stopping:
                        waiting.appendleft(task)
                    continue
                if kind == "done":
                    worker.task = None
                    yield task, message
                elif kind == "failed":
                    raise message
                else:
                    on_report(task, message)

    def close(self) -> None:
        """End the processes: idle ones exit, busy ones are terminated."""
        for worker in self._workers:
            if worker.task is None:
                worker.pipe.close()
            else:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join()

    def _idle_worker(self) -> _Worker[Task] | None:
        """A worker without a task, started if there are fewer than `count`; None when all are busy."""
        free = next((worker for worker in self._workers if worker.task is None), None)
        if free is None and len(self._workers) < self._count:
            free = self._start(len(self._workers))
            self._workers.append(free)
        return free

    def _start(self, number: int) -> _Worker[Task]:
        parent_pipe, worker_pipe = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(worker_pipe, self._load, number, self._count), daemon=self._daemon
        )
        process.start()
        worker_pipe.close()
        return _Worker(process, parent_pipe)

    def _assign(self, worker: _Worker[Task], task: Task) -> None:
        worker.task = task
        with suppress(OSError):  # the worker died while idle: handled when its answer is read
            worker.pipe.send(task)

    def _replace(self, worker: _Worker[Task]) -> None:
        worker.process.join()
        fresh = self._start(self._workers.index(worker))
        worker.process, worker.pipe, worker.task = fresh.process, fresh.pipe, None


def _work(pipe: Connection, load: Callable[[int, int], WorkerFunction[Any, Any]], number: int, count: int) -> None:
    """Do the tasks that come through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides

    def report(message: Any) -> None:
        pipe.send(("report", message))

    try:
        run = load(number, count)
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            pipe.send(("done", run(task, report)))
    except UserError as error:
        pipe.send(("failed", UserError(str(error))))
    except BrokenPipeError:
        return  # the parent is gone
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        pipe.send(("failed", RuntimeError(f"a worker failed: {type(error).__name__}: {error}")))
