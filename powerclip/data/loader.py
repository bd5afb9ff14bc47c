"""Batches as a function of their number: made in turn or ahead, the same either way, so resuming needs no state."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.keyed_random import Keys, uniforms
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks

# Raised when the same seeds give other batches: a run that was begun with another one is not continued bit for bit.
DRAWS_VERSION = 2

WORKER_KILLED = (
    "a process that prepares batches has been killed, perhaps because memory ran out: lower data.workers or "
    "train.batch_size and continue with --resume"
)


@contextmanager
def killed_workers() -> Iterator[None]:
    """UserError when a process that makes batches has been killed: torch raises that at any point of this process."""
    try:
        yield
    except (RuntimeError, UserError) as error:
        if "DataLoader worker" not in str(error) and str(error) != WORKER_KILLED:
            raise
        if threading.current_thread() is threading.main_thread():
            # Torch would raise it again as further workers end, while this process exits.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise UserError(WORKER_KILLED) from None


def begin_worker(_: int) -> None:
    """Workers end with the process that they work for, not before: it may want to finish a step and save it."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)
    # Pillow would warn of odd images in every worker; those that matter are counted as faults.
    warnings.filterwarnings("ignore", module="PIL")
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent is gone. Torch looks too, but then waits for a reader of what is still sent."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class BatchLoader(ABC):
    """Makes batches by their number: this rank's equal share of each, in order.

    Raises:
        UserError: the ranks cannot share a batch evenly.
    """

    def __init__(self, spec: BatchSpec, ranks: Ranks = SINGLE):
        if spec.batch_size % ranks.count:
            raise UserError(f"train.batch_size is {spec.batch_size}, which {ranks.count} ranks cannot share evenly")
        self.spec = spec
        self._rows = ranks.rows(spec.batch_size // ranks.count)  # of a batch, those of this rank

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order."""
        workers = self.spec.workers
        if workers == 0:
            yield from map(self.batch, range(start, stop))
            return
        pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        ahead: deque[Future[Batch]] = deque()
        try:
            for step in range(start, stop):
                ahead.append(pool.submit(self.batch, step))
                # One in reserve for each thread that is at work.
                if len(ahead) > 2 * workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # Also when the consumer stops early: no thread is left running.
            pool.shutdown(wait=True, cancel_futures=True)


def box_draws(keys: Keys, regions: int) -> Tensor:
    """The uniform numbers [4, C, M] that `powerclip.alignment.regions.boxes_of` makes random boxes of, by key."""
    return torch.from_numpy(uniforms(keys, 4 * regions).reshape(len(keys), 4, regions).transpose(1, 0, 2).copy())
