"""Runs of studies in several processes of this machine, which share its GPUs and cores."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from powerclip.compare.study import Study
from powerclip.errors import UserError
from powerclip.runtime.processes import ProcessPool, Report, WorkerFunction
from powerclip.runtime.progress import duration
from powerclip.runtime.signals import Preempted, Signals, StopRequest
from powerclip.train.data import CorpusStore
from powerclip.train.loop import train
from powerclip.train.recipe import Recipe
from powerclip.train.results import Results, write_results
from powerclip.train.run_folder import RunFolder
from powerclip.train.state import TrainState

_OFTEN = 0.5  # seconds between two messages on how far a run is


@dataclass(frozen=True, eq=False)
class Run:
    """A recipe to train, and where."""

    recipe: Recipe
    folder: Path


@dataclass(frozen=True)
class Ended:
    """How a run has ended."""

    outcome: Results | str  # or why there are none
    printed: str = ""  # warnings


class Processes:
    """Trains runs `count` at a time. The processes start with the first run, and keep corpora and compiled towers.

    Each sees one GPU, where there are several, and has its share of the cores. Runs that share a GPU, or the CPU, leave
    no time of a step in their results: it would say nothing about the setting. Use it in a `with` block, which ends
    them.
    """

    def __init__(self, count: int, *, gpus: Sequence[str] = ()):
        self.count, self._gpus = count, tuple(gpus)
        self._pool: ProcessPool[Run, Ended] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.close()

    def train(self, runs: Sequence[Run], console: Console, *, quiet: bool) -> Iterator[tuple[Run, Results | str]]:
        """The results of each run, or why there are none, as they end.

        Raises:
            Preempted: SIGTERM asked for it.
        """
        if not runs:
            return
        if self._pool is None:
            self._pool = ProcessPool(partial(_load, self._gpus), self.count, daemon=False)  # loaders have processes too
        with _Bar(runs, console, quiet=quiet) as bar, Signals() as signals:

            def stop() -> bool:
                if signals.request() is StopRequest.STOP:
                    raise Preempted("stopped")
                return False

            for run, ended in self._pool.run(runs, stop, bar.on_report):
                bar.ended(run)
                if ended is None:
                    yield run, "every process that tried it died, perhaps because memory ran out: lower --processes"
                    continue
                if ended.printed:
                    console.print(ended.printed.rstrip(), style="yellow", markup=False, highlight=False, soft_wrap=True)
                yield run, ended.outcome


def start_processes(count: int | None, studies: Sequence[Study]) -> Processes:
    """So many processes; by default one for each GPU, or one.

    Raises:
        UserError: several processes, and a recipe that names one GPU.
    """
    devices = {setting.recipe.train.device for study in studies for setting in study.settings}
    named = sorted(device for device in devices if ":" in device)
    gpus = visible_gpus() if devices & {"auto", "cuda"} else []
    count = (1 if named else max(1, len(gpus))) if count is None else count
    if count > 1 and named and len(gpus) > 1:
        raise UserError(
            f"--processes spreads runs over the GPUs, and train.device={named[0]} names one: say cuda or auto"
        )
    return Processes(count, gpus=gpus)


def visible_gpus() -> list[str]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES names them."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(number) for number in range(torch.cuda.device_count())])[: torch.cuda.device_count()]


def _load(gpus: Sequence[str], number: int, count: int) -> WorkerFunction[Run, Ended]:
    """The worker of a process: it keeps the corpora that it has read."""
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]  # read when CUDA is first used, which is later
    if "OMP_NUM_THREADS" not in os.environ:  # who sets it means it
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    store = CorpusStore()

    def work(run: Run, report: Report) -> Ended:
        printed = io.StringIO()
        try:
            done = train(
                run.recipe,
                run.folder,
                overwrite=True,
                quiet=True,
                console=Console(file=printed),
                store=store,
                on_step=_Watch(report),
            )
            results = done.results
            if count > max(1, len(gpus)):
                results = replace(results, seconds_per_step=None)
                write_results(RunFolder(run.folder).results, results)
            return Ended(results, printed.getvalue())
        except UserError as error:
            return Ended(str(error), printed.getvalue())
        except Preempted:
            sys.exit()

    return work


class _Watch:
    """Tells the parent how far a run is, not too often, and ends the process when the parent is gone."""

    def __init__(self, report: Report):
        self._report, self._last, self._parent = report, time.monotonic(), os.getppid()

    def __call__(self, state: TrainState) -> None:
        if time.monotonic() - self._last < _OFTEN:
            return
        self._last = time.monotonic()
        if os.getppid() != self._parent:
            sys.exit()
        self._report(state.step)


class _Bar:
    """All runs in one bar, on a terminal."""

    def __init__(self, runs: Sequence[Run], console: Console, *, quiet: bool):
        self._total, self._ended, self._began = len(runs), 0, time.monotonic()
        self._parts: dict[Run, float] = {}  # of the runs that have begun, how much is done
        self._bar = Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._total, text=f"0/{self._total} runs")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_report(self, run: Run, step: int) -> None:
        """A run is after that step."""
        # A recipe in epochs has its steps counted when it begins.
        self._parts[run] = 0.0 if run.recipe.train.epochs is not None else step / run.recipe.train.steps
        self._show()

    def ended(self, run: Run) -> None:
        """A run has come to its end."""
        self._parts.pop(run, None)
        self._ended += 1
        self._show()

    def _show(self) -> None:
        done = self._ended + sum(self._parts.values())
        left = (time.monotonic() - self._began) * (self._total - done) / done if done else 0.0
        self._bar.update(self._task, completed=done, text=f"{self._ended}/{self._total} runs  eta {duration(left)}")
