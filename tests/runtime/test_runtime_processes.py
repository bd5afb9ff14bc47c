"""The process pool: every task ends once, whatever happens to the processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from powerclip.errors import UserError
from powerclip.runtime.processes import ProcessPool, Report, WorkerFunction


def load(folder: Path, number: int, count: int) -> WorkerFunction[str, tuple[str, int]]:
    """A worker that says what it is reports to, leaves a file, and dies or fails when asked."""

    def work(task: str, report: Report) -> tuple[str, int]:
        (folder / f"{task}-{os.getpid()}").touch()
        if task == "deadly" or (task == "deadly once" and len(list(folder.glob("deadly once-*"))) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "wrong":
            raise UserError("the task is wrong")
        if task == "broken":
            raise ValueError("a bug")
        report(f"half of {task}")
        return task.upper(), number

    return work


def never() -> bool:
    return False


def run(folder: Path, tasks: list[str], count: int = 2, stop: Callable[[], bool] = never):
    """The results by task, and the reports."""
    reports: list[tuple[str, str]] = []
    pool: ProcessPool[str, tuple[str, int]] = ProcessPool(partial(load, folder), count)
    try:
        return dict(pool.run(tasks, stop, lambda task, message: reports.append((task, message)))), reports
    finally:
        pool.close()


def test_every_task_ends_once_and_tells_how_far_it_is(tmp_path):
    tasks = [f"task {n}" for n in range(5)]
    outcomes, reports = run(tmp_path, tasks)
    assert {task: outcome[0] for task, outcome in outcomes.items()} == {task: task.upper() for task in tasks}
    assert {outcome[1] for outcome in outcomes.values()} <= {0, 1}
    assert sorted(reports) == [(task, f"half of {task}") for task in tasks]


def test_no_more_processes_start_than_there_are_tasks(tmp_path):
    pool: ProcessPool[str, tuple[str, int]] = ProcessPool(partial(load, tmp_path), 50)
    try:
        assert len(list(pool.run(["a"], never, lambda *_: None))) == 1
        assert len(list(pool.run(["b"], never, lambda *_: None))) == 1  # by the same one
    finally:
        pool.close()
    processes = {path.name.split("-")[1] for path in tmp_path.iterdir()}
    assert len(processes) == 1


def test_a_process_that_dies_is_replaced_and_its_task_begun_again(tmp_path):
    outcomes, _ = run(tmp_path, ["deadly once", "calm", "deadly", "last"])
    assert outcomes.pop("deadly") is None
    assert {task: outcome[0] for task, outcome in outcomes.items()} == {
        "deadly once": "DEADLY ONCE", "calm": "CALM", "last": "LAST"
    }  # fmt: skip
    assert len(list(tmp_path.glob("deadly-*"))) == 3
    assert len(list(tmp_path.glob("deadly once-*"))) == 2


def test_what_the_user_got_wrong_and_what_is_broken_reach_the_parent(tmp_path):
    with pytest.raises(UserError, match="the task is wrong"):
        run(tmp_path, ["wrong"])
    with pytest.raises(RuntimeError, match="a worker failed: ValueError: a bug"):
        run(tmp_path, ["broken"])


def test_nothing_begins_after_stop_and_what_has_begun_ends(tmp_path):
    begun = time.monotonic()
    outcomes, _ = run(tmp_path, ["a", "b", "c"], count=1, stop=lambda: any(tmp_path.iterdir()))
    assert list(outcomes) == ["a"]
    assert time.monotonic() - begun < 60
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["a"]
