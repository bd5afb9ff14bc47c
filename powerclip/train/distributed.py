"""Joining the processes that torchrun started, and what changes for each of them.

    torchrun --nproc-per-node 8 -m powerclip train --recipe R

Errors: what the user got wrong is found by all ranks at the same place, or told to all by `Ranks.together`, before
training begins. What fails on one rank later ends it, torchrun then ends the others, and they say no more than that.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from powerclip.errors import UserError
from powerclip.ranks import ALONE, Ranks, SharedError
from powerclip.train.recipe import TrainSection
from powerclip.train.towers import Towers

# Longer than any rank has to wait for another that works: reading a corpus, or writing a large checkpoint.
PATIENCE = timedelta(minutes=30)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """This process among those that torchrun started, or alone; `device` is the recipe's `train.device`."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE
        return
    ranks = Ranks(int(os.environ["RANK"]), count, int(os.environ.get("LOCAL_RANK", "0")))
    inside = dist.is_initialized()  # a study trains many times
    if not inside:
        join(ranks, uses_gpu(device))
    try:
        yield ranks
    except SharedError:
        if not inside:
            dist.destroy_process_group()
        if ranks.first:
            raise
        # With exit code 0: torchrun ends all ranks when one fails, perhaps before the first has said why.
        raise SystemExit(0) from None
    except UserError:
        # Still connected: a rank that waits for this one must not complain before it has said what is wrong.
        raise
    except (dist.DistError, RuntimeError) as error:
        if not lost_contact(error):
            raise
        raise UserError(f"rank {ranks.rank} lost contact with another one, which says why") from error
    if not inside:
        dist.destroy_process_group()


def join(ranks: Ranks, gpu: bool) -> None:
    """Meet the other ranks: nccl between GPUs, gloo between hosts."""
    if gpu:
        torch.cuda.set_device(own_gpu(ranks))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", rank=ranks.rank, world_size=ranks.count, timeout=PATIENCE
    )


def uses_gpu(device: str) -> bool:
    """Whether a recipe's `train.device` means a GPU here."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def own_gpu(ranks: Ranks) -> torch.device:
    """This rank's GPU; UserError when torchrun started more processes than there are."""
    found = torch.cuda.device_count()
    if ranks.local >= found:
        raise UserError(
            f"torchrun started more processes on this machine than it has GPUs ({found}): lower --nproc-per-node, or "
            "train on the CPU with train.device=cpu"
        )
    return torch.device("cuda", ranks.local)


def lost_contact(error: BaseException) -> bool:
    """Whether an error says that another process is gone, not that this one did something wrong."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    text = str(error)
    return "gloo" in text and any(sign in text for sign in ("onnection", "Timed out", "Broken pipe"))


def check_batch(settings: TrainSection, ranks: Ranks) -> None:
    """UserError unless the batch divides into equal parts, one for each rank and each pass through the towers."""
    parts = ranks.count * settings.accumulate
    if settings.batch_size % parts:
        nearest = max(1, round(settings.batch_size / parts)) * parts
        raise UserError(
            f"train.batch_size is {settings.batch_size}, which {ranks.count} ranks × train.accumulate "
            f"{settings.accumulate} cannot share equally: make it a multiple of {parts}, such as {nearest}"
        )


def wrap(towers: Towers, device: torch.device, ranks: Ranks) -> nn.Module:
    """The towers, their gradients averaged over ranks while the backward pass still runs."""
    from torch.nn.parallel import DistributedDataParallel

    if ranks.alone:
        return towers
    # Buffers are the same on all ranks and need no message. torch has renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    gpu = [device] if device.type == "cuda" else None
    return DistributedDataParallel(towers, device_ids=gpu, gradient_as_bucket_view=True, **options)


class Nothing:
    """Stands, on all ranks but the first, where that one has something that writes; takes everything, does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
