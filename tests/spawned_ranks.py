"""Real processes that join each other as those of torchrun do, for tests.

Processes are forked from one that has imported everything: starting some costs no more than running them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

PATIENCE = 200  # seconds


def spawn_ranks(count: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(folder, *arguments)` returns on each of `count` ranks that torchrun would have started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["powerclip.train.loop", "powerclip.encoders.models", "torch.utils.tensorboard"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_run_rank, args=(rank, count, port, work, folder, arguments)) for rank in range(count)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE)
    hung = [process for process in ranks if process.is_alive()]
    for process in hung:
        process.kill()
    answers = []
    for rank in range(count):
        complaint = folder / f"error-{rank}.txt"
        assert not complaint.exists(), f"rank {rank}: {complaint.read_text()}"
    assert not hung, "ranks wait for each other"
    for rank in range(count):
        answers.append(torch.load(folder / f"answer-{rank}.pt", weights_only=False))
    return answers


def _run_rank(
    rank: int, count: int, port: int, work: Callable[..., Any], folder: Path, arguments: Sequence[Any]
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    own = folder / f"rank-{rank}"
    own.mkdir()
    try:
        torch.save(work(own, *arguments), folder / f"answer-{rank}.pt")
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise
