"""Evaluation on several GPUs: under torchrun each rank embeds its share, all have the whole, the first one writes.

    torchrun --nproc-per-node 8 -m powerclip evaluate --model M --suite paper --data ROOT

All ranks go through the same datasets in the same order and compute the same metrics, so an error is met by all of them
at the same place. Embeddings lie on the CPU, and gloo carries them there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed as dist

from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks

T = TypeVar("T")


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone. What the user got wrong is said by the first of them."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield SINGLE
        return
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), count, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        yield ranks
    except UserError:
        # With exit code 0: torchrun stops all ranks when one fails, perhaps before the first has said why.
        if not ranks.is_main:
            raise SystemExit(0) from None
        raise
    finally:
        dist.destroy_process_group()


def device_for(ranks: Ranks, wanted: str | None) -> str:
    """The device to compute on: `cuda` is this rank's own GPU, and the default where there is one.

    Raises:
        UserError: there are more ranks on this machine than GPUs.
    """
    chosen = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen != "cuda" or ranks.is_single:
        return chosen
    if ranks.local >= torch.cuda.device_count():
        raise UserError(
            f"torchrun started more processes than there are GPUs ({torch.cuda.device_count()}): "
            "lower --nproc-per-node, or use --device cpu"
        )
    return f"cuda:{ranks.local}"


def threads_for(ranks: Ranks) -> int:
    """Threads that may read images: the cores, shared by the ranks on this machine."""
    beside = 1 if ranks.is_single else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (os.cpu_count() or 1) // beside)


def on_all(ranks: Ranks, find: Callable[[], T]) -> T:
    """What `find` finds on this rank. An error on one of them is raised, as it is, on all of them: none waits."""
    result, error = None, None
    try:
        result = find()
    except UserError as raised:
        error = raised
    for one in ranks.collect(error):
        if one is not None:
            raise one
    return result  # type: ignore[return-value]
