"""Batches as a function of their number: made in turn or ahead, the same either way, so resuming needs no state."""

from __future__ import annotations

import hashlib
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from powerclip.data.batch import Batch
from powerclip.errors import UserError

WORKER_KILLED = (
    "a process that prepares batches has been killed, perhaps because memory ran out: lower data.workers or "
    "train.batch_size and continue with --resume"
)


@contextmanager
def killed_workers() -> Iterator[None]:
    """UserError when a process that makes batches has been killed: torch tells of it wherever this process then is."""
    try:
        yield
    except (RuntimeError, UserError) as error:
        if "DataLoader worker" not in str(error) and str(error) != WORKER_KILLED:
            raise
        if threading.current_thread() is threading.main_thread():
            # Torch would tell of it again when the next process ends, and this one is about to.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise UserError(WORKER_KILLED) from None


class BatchLoader(ABC):
    """Makes batches by their number.

    `workers` threads make batches ahead; 0 makes each when it is needed.
    """

    def __init__(self, workers: int = 0):
        self.workers = workers

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order."""
        if self.workers == 0:
            yield from map(self.batch, range(start, stop))
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="batches")
        ahead: deque[Future[Batch]] = deque()
        try:
            for step in range(start, stop):
                ahead.append(pool.submit(self.batch, step))
                # One in reserve for each thread that is at work.
                if len(ahead) > 2 * self.workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # Reached too when the consumer stops early: nothing is left running behind its back.
            pool.shutdown(wait=True, cancel_futures=True)


def mix(seed: int, step: int) -> int:
    """One number for the pair. The CPU generator looks at 32 bits of its seed only: sums would meet."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=4).digest(), "little")


def share_of(batch_size: int, rank: int, world_size: int) -> slice:
    """The rows of a batch that fall to one of `world_size` ranks: equal shares, in order."""
    if batch_size % world_size:
        raise ValueError(f"a batch of {batch_size} does not divide into {world_size} equal shares")
    size = batch_size // world_size
    return slice(rank * size, (rank + 1) * size)
