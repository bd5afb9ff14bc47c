"""How the runs of studies are trained: one after the other, or several at a time in processes of this machine."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import torch
from rich.console import Console

from powerclip.compare.study import Run, RunFailure, Study
from powerclip.errors import UserError
from powerclip.runtime.processes import ProcessPool, Report, WorkerFunction
from powerclip.runtime.progress import Progress, print_line
from powerclip.runtime.signals import Preempted, Signals, StopRequest
from powerclip.train.data_cache import DataCache
from powerclip.train.loop import train
from powerclip.train.recipe import differences
from powerclip.train.results import Results, write_results
from powerclip.train.state import TrainState

REPORT_SECONDS = 0.5  # between two messages on how far a run is

RunResult = tuple[Run, Results | RunFailure]


@dataclass(frozen=True)
class WorkerResult:
    """What a worker process sends back of a run."""

    result: Results | RunFailure
    printed: str = ""  # warnings


def train_run(
    run: Run,
    cache: DataCache,
    console: Console,
    *,
    quiet: bool,
    on_step: Callable[[TrainState], None] | None = None,
) -> Results | RunFailure:
    """Train a run. What its folder holds is replaced, unless it is the same run, interrupted, and is to be resumed."""
    resume = run.resume and _is_interrupted(run)
    try:
        trained = train(
            run.recipe,
            run.folder.root,
            resume="auto" if resume else False,
            overwrite=not resume,
            quiet=quiet,
            console=console,
            cache=cache,
            on_step=on_step,
        )
        return trained.results
    except UserError as error:
        return RunFailure(str(error))


def train_in_turn(runs: Sequence[Run], cache: DataCache, console: Console, *, quiet: bool) -> Iterator[RunResult]:
    """Train runs in this process, one after the other."""
    for run in runs:
        yield run, train_run(run, cache, console, quiet=quiet)


class Processes:
    """Trains runs `count` at a time. The processes start with the first run, and keep corpora and compiled towers.

    Each sees one GPU, where there are several, and has its share of the cores. Runs that share a GPU, or the CPU, have
    no step time in their results: it would say nothing about the setting. Use it in a `with` block, which ends the
    processes.
    """

    def __init__(self, count: int, *, gpus: Sequence[str] = ()):
        self.count, self._gpus = count, tuple(gpus)
        self._pool: ProcessPool[Run, WorkerResult] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.close()

    def train(self, runs: Sequence[Run], console: Console, *, quiet: bool) -> Iterator[RunResult]:
        """Train runs, and give their results as they end.

        Raises:
            Preempted: SIGTERM was received.
        """
        if not runs:
            return
        if self._pool is None:
            self._pool = ProcessPool(partial(_load, self._gpus), self.count, daemon=False)  # loaders have processes too
        progress = Progress("", len(runs), unit="runs", quiet=quiet, console=console, transient=True)
        ended, started = 0, dict[Run, float]()  # of the runs that have begun, the share that is done

        def stop() -> bool:
            if signals.request() is StopRequest.STOP:
                raise Preempted("stopped")
            return False

        def on_report(run: Run, step: int) -> None:
            # A recipe in epochs has its steps counted when it begins.
            started[run] = 0.0 if run.recipe.train.epochs is not None else step / run.recipe.train.steps
            progress.update(ended, partial=sum(started.values()))

        with progress, Signals() as signals:
            for run, worked in self._pool.run(runs, stop, on_report):
                started.pop(run, None)
                ended += 1
                progress.update(ended, partial=sum(started.values()))
                if worked is None:
                    reason = "every process that tried it died, perhaps because memory ran out: lower --processes"
                    yield run, RunFailure(reason)
                    continue
                if worked.printed:
                    print_line(console, worked.printed.rstrip(), style="yellow")
                yield run, worked.result


def start_processes(count: int | None, studies: Sequence[Study]) -> Processes:
    """A pool of `count` processes; by default one for each GPU, or one.

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


def _is_interrupted(run: Run) -> bool:
    """Whether the folder holds the same run, begun and not finished."""
    if run.folder.finished or not run.folder.holds_run():
        return False
    with suppress(UserError):  # damaged, or written by an older version: as good as another recipe
        return not differences(run.folder.read_recipe(), run.recipe, counted=False)
    return False


def _load(gpus: Sequence[str], number: int, count: int) -> WorkerFunction[Run, WorkerResult]:
    """The worker of a process: it keeps the corpora that it has read."""
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]  # read when CUDA is first used, which is later
    if "OMP_NUM_THREADS" not in os.environ:  # a user's own number stays
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    cache = DataCache()

    def work(run: Run, report: Report) -> WorkerResult:
        printed = io.StringIO()
        try:
            result = train_run(run, cache, Console(file=printed), quiet=True, on_step=_StepReporter(report))
        except Preempted:
            sys.exit()
        if isinstance(result, Results) and count > max(1, len(gpus)):
            result = replace(result, seconds_per_step=None)
            write_results(run.folder.results, result)
        return WorkerResult(result, printed.getvalue())

    return work


class _StepReporter:
    """Reports the step of a run to the parent, not too often, and ends the process when the parent is gone."""

    def __init__(self, report: Report):
        self._report, self._last, self._parent = report, time.monotonic(), os.getppid()

    def __call__(self, state: TrainState) -> None:
        if time.monotonic() - self._last < REPORT_SECONDS:
            return
        self._last = time.monotonic()
        if os.getppid() != self._parent:
            sys.exit()
        self._report(state.step)
