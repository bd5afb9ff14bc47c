"""One queue before the models: questions that wait are answered together, and beyond a few more come back as busy."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from powerclip.errors import UserError

if TYPE_CHECKING:
    from powerclip.demo.engine import Answer, Engine, Question

MOST_WAITING = 16
MOST_AT_ONCE = 8


class Busy(Exception):
    """Too many questions wait already."""


class ModelQueue:
    """Questions in, answers out; one thread runs the models.

    Args:
        engine: answers questions.
        most_waiting: questions that may wait; the next one is refused.
        most_at_once: questions of one batch.
    """

    def __init__(self, engine: Engine, most_waiting: int = MOST_WAITING, most_at_once: int = MOST_AT_ONCE) -> None:
        self._engine = engine
        self._most_at_once = most_at_once
        self._waiting: asyncio.Queue[tuple[Question, asyncio.Future[Answer]]] = asyncio.Queue(most_waiting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, question: Question) -> Answer:
        """The answer to a question.

        Raises:
            Busy: too many are waiting.
            UserError: it cannot be answered.
        """
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            self._waiting.put_nowait((question, future))
        except asyncio.QueueFull:
            raise Busy from None
        return await future

    async def close(self) -> None:
        """Stop when the batch at work is done."""
        if self._worker is not None:
            self._worker.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _work(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._most_at_once and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # Someone who went away while waiting need not be answered: a page asks anew at every key press.
            batch = [(question, future) for question, future in batch if not future.cancelled()]
            if batch:
                await self._run(batch)

    async def _run(self, batch: list[tuple[Question, asyncio.Future[Answer]]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._engine.answer, [question for question, _ in batch])
        except Exception as error:  # a bug: those who wait shall hear of it, and the next batch be answered
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, UserError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
