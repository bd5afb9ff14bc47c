"""Processes of this machine that share a list of tasks. One that dies is replaced, and its task begun again."""

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
Outcome = TypeVar("Outcome")
Tell = Callable[[Any], None]  # sends the parent word of how far a task is
Worker = Callable[[Task, Tell], Outcome]

ATTEMPTS = 3  # at a task on which processes die


@dataclass
class _Member(Generic[Task]):
    process: BaseProcess
    pipe: Connection
    task: Task | None = None


class Crew(Generic[Task, Outcome]):
    """Processes that take one task at a time.

    Args:
        load: makes the worker of a process from its number and the number of all, once in each. It travels there, as do
            tasks, outcomes and what is told: all must be picklable, tasks hashable too.
        count: how many processes, at most: one starts when there is a task for it.
        daemon: whether Python ends them with this process if `close` is not called; such may start none of their own.
    """

    def __init__(self, load: Callable[[int, int], Worker[Task, Outcome]], count: int, *, daemon: bool = True):
        self._load, self._count, self._daemon = load, count, daemon
        # A fork would share the parent's threads and GPU, which neither survives.
        self._context = multiprocessing.get_context("spawn")
        self._members: list[_Member[Task]] = []

    def run(
        self, tasks: Iterable[Task], stop: Callable[[], bool], told: Callable[[Task, Any], None]
    ) -> Iterator[tuple[Task, Outcome | None]]:
        """The outcome of each task, as they end; None for one on which every process died.

        Once `stop` is true, which is asked twice a second, no further task begins. `told` gets what workers tell of
        theirs.

        Raises:
            UserError: a worker's own.
            RuntimeError: a worker failed.
        """
        waiting, deaths = deque(tasks), Counter[Task]()
        while True:
            stopping = stop()
            while waiting and not stopping and (free := self._free()):
                self._hand(free, waiting.popleft())
            busy = [member for member in self._members if member.task is not None]
            if not busy:
                return
            ready = wait([member.pipe for member in busy], timeout=0.5)  # a signal is seen when it returns
            for member in busy:
                if member.pipe not in ready:
                    continue
                task = member.task
                assert task is not None
                try:
                    kind, message = member.pipe.recv()
                except (EOFError, OSError):
                    deaths[task] += 1
                    self._replace(member)
                    if deaths[task] >= ATTEMPTS:
                        yield task, None
                    elif not stopping:
                        waiting.appendleft(task)
                    continue
                if kind == "done":
                    member.task = None
                    yield task, message
                elif kind == "failed":
                    raise message
                else:
                    told(task, message)

    def close(self) -> None:
        """End the processes: those that wait leave, those that work are stopped."""
        for member in self._members:
            if member.task is None:
                member.pipe.close()
            else:
                member.process.terminate()
        for member in self._members:
            member.process.join()

    def _free(self) -> _Member[Task] | None:
        """A process without a task, a new one if need be; None when all there may be have one."""
        free = next((member for member in self._members if member.task is None), None)
        if free is None and len(self._members) < self._count:
            free = self._start(len(self._members))
            self._members.append(free)
        return free

    def _start(self, number: int) -> _Member[Task]:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(there, self._load, number, self._count), daemon=self._daemon
        )
        process.start()
        there.close()
        return _Member(process, here)

    def _hand(self, member: _Member[Task], task: Task) -> None:
        member.task = task
        with suppress(OSError):  # it has died while it waited: seen, and dealt with, when its answer is read
            member.pipe.send(task)

    def _replace(self, member: _Member[Task]) -> None:
        member.process.join()
        fresh = self._start(self._members.index(member))
        member.process, member.pipe, member.task = fresh.process, fresh.pipe, None


def _work(pipe: Connection, load: Callable[[int, int], Worker[Any, Any]], number: int, count: int) -> None:
    """Do the tasks that come through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides

    def tell(message: Any) -> None:
        pipe.send(("told", message))

    try:
        worker = load(number, count)
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            pipe.send(("done", worker(task, tell)))
    except UserError as error:
        pipe.send(("failed", UserError(str(error))))
    except BrokenPipeError:
        return  # the parent is gone
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        pipe.send(("failed", RuntimeError(f"a worker failed: {type(error).__name__}: {error}")))
