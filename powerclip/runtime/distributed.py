"""Ranks and devices: this process among those that torchrun started, collectives with gradients, the device to use.

    torchrun --nproc-per-node 8 -m powerclip train --recipe R

n ranks hold C/n rows of a batch each. A rank computes a loss ℓ_r such that the loss of the whole batch is their mean,
and gradients are averaged over ranks after the backward pass, as DistributedDataParallel does. Then each message's
gradient is a sum over ranks: what all of them have done with the one tensor that they share.

Errors: what the user got wrong is raised on all ranks at the same place (`Ranks.raise_on_all`) before work begins. What
fails on one rank later ends that rank; torchrun then ends the others.

Axes: C pairs of the whole batch · c = C/n rows of this rank · … anything
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

# Imported before a process group exists: its functions keep the current group as a default argument, and with it
# threads that can abort Python's exit. open_clip imports it when the first model is built.
import torch.distributed.nn
from torch import Tensor
from torch import distributed as dist

from powerclip.errors import UserError

T = TypeVar("T")

# Longer than a rank may have to wait for another one that works: reading a data set, or writing a large checkpoint.
TIMEOUT = timedelta(minutes=30)


class SharedError(UserError):
    """A `UserError` that was raised on all ranks: only the main one prints it."""


@dataclass(frozen=True)
class Ranks:
    """This process and how many there are; a single one by default.

    All ranks must call the same methods in the same order. With a single rank nothing is communicated.
    """

    rank: int = 0
    count: int = 1  # n, the world size
    local: int = 0  # rank on this machine: the index of its GPU

    @property
    def is_single(self) -> bool:
        """Whether there is only one rank."""
        return self.count == 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """Where the `count` rows of this rank lie among those of all."""
        return slice(self.rank * count, (self.rank + 1) * count)

    # Collectives of tensors, on their own device.

    def gather(self, values: Tensor) -> Tensor:
        """The rows of all ranks [C, …] from those of this one [c, …], the same number on each; with gradient."""
        return values if self.is_single else _Gather.apply(values, self.rank)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a tensor, on all of them; with gradient."""
        return values if self.is_single else _Sum.apply(values)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks of a tensor, on all of them; with gradient."""
        return values if self.is_single else _Sum.apply(values) / self.count

    def logsumexp(self, values: Tensor) -> Tensor:
        """log Σ_r exp x_r over ranks, element by element, with the maximum taken out; with gradient."""
        if self.is_single:
            return values
        highest = self.max(values)
        return highest + self.sum((values - highest).exp()).log()

    @torch.no_grad()
    def max(self, values: Tensor) -> Tensor:
        """The maximum over ranks, element by element; no gradient."""
        if self.is_single:
            return values
        highest = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return highest

    @torch.no_grad()
    def exchange(self, values: Tensor) -> Tensor:
        """Hand each rank its rows: of [C, …] the ones that `rows` names, as [n, c, …] from all ranks; no gradient."""
        if self.is_single:
            return values.unsqueeze(0)
        received = torch.empty_like(values, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, values.contiguous())
        return received.unflatten(0, (self.count, -1))

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients of parameters that no wrapper averages by their mean over ranks, in one message."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.is_single or not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    # Numbers and objects, between hosts: no device sync.

    def numbers(self, *values: int) -> list[tuple[int, ...]]:
        """Some whole numbers of each rank, on all of them."""
        if self.is_single:
            return [values]
        # A sum with zeros: gloo adds in log n rounds, and gathers in n.
        rows = torch.zeros(self.count, len(values), dtype=torch.int64)
        rows[self.rank] = torch.tensor(values)
        dist.all_reduce(rows)
        return [tuple(row) for row in rows.tolist()]

    def collect(self, value: T) -> list[T]:
        """A value of each rank, on all of them."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def max_int(self, value: int) -> int:
        """The maximum over ranks of a whole number."""
        return int(self.max(torch.tensor(value)))

    def mean_of(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean over ranks of some numbers, the same names on each."""
        if self.is_single:
            return dict(values)
        mean = self.mean(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, mean.tolist(), strict=True))

    def broadcast(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on the main rank, on all of them; the others do not call it."""
        return self.raise_on_all(lambda: compute() if self.is_main else None, _first)  # type: ignore[return-value]

    def raise_on_all(self, action: Callable[[], T], share: Callable[[list[T]], T] | None = None) -> T:
        """What `action` returns on this rank. A `UserError` on one rank becomes a `SharedError` on all of them.

        With `share`, the result on every rank is `share` of the list of all ranks' results.
        """
        if self.is_single:
            return action()
        result: Any = None
        error: str | None = None
        try:
            result = action()
        except UserError as raised:
            error = str(raised)
        answers = self.collect((error, result if share and error is None else None))
        for rank, (problem, _) in enumerate(answers):
            if problem is not None:
                raise SharedError(problem if rank == 0 else f"rank {rank}: {problem}")
        results: list[Any] = [answer for _, answer in answers]
        return share(results) if share else result


def _first(answers: list[T]) -> T:
    return answers[0]


SINGLE = Ranks()


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """This process among those that torchrun started, or a single one.

    `device` is the user's setting (`auto`, `cpu`, `cuda`): it decides between nccl and gloo. Where a process
    group exists already, as in a study that trains many runs, it is used and left open.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield SINGLE
        return
    ranks = Ranks(int(os.environ["RANK"]), count, int(os.environ.get("LOCAL_RANK", "0")))
    nested = dist.is_initialized()
    if not nested:
        init_process_group(ranks, gpu=uses_gpu(device))
    try:
        yield ranks
    except SharedError:
        if not nested:
            dist.destroy_process_group()
        if ranks.is_main:
            raise
        # With exit code 0: torchrun ends all ranks when one fails, perhaps before the main one has printed the error.
        raise SystemExit(0) from None
    except UserError:
        # The group stays open: a rank that waits for this one must not report a lost connection before this error.
        raise
    except (dist.DistError, RuntimeError) as error:
        if not lost_connection(error):
            raise
        raise UserError(f"rank {ranks.rank} lost the connection to another rank, whose own error says why") from error
    if not nested:
        dist.destroy_process_group()


def init_process_group(ranks: Ranks, *, gpu: bool) -> None:
    """Join the other ranks: nccl between GPUs, gloo between hosts."""
    if gpu:
        torch.cuda.set_device(local_gpu(ranks))
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.count, timeout=TIMEOUT)


def lost_connection(error: BaseException) -> bool:
    """Whether an error says that another process is gone, not that this one did something wrong."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    text = str(error)
    return "gloo" in text and any(sign in text for sign in ("onnection", "Timed out", "Broken pipe"))


def uses_gpu(device: str) -> bool:
    """Whether `auto`, `cpu`, `cuda` or `cuda:1` means a GPU on this machine."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def local_gpu(ranks: Ranks) -> torch.device:
    """This rank's GPU; UserError when torchrun started more processes than there are GPUs."""
    count = torch.cuda.device_count()
    if ranks.local >= count:
        raise UserError(
            f"torchrun started more processes on this machine than it has GPUs ({count}): lower --nproc-per-node, or "
            "use the CPU (train.device=cpu, --device cpu)"
        )
    return torch.device("cuda", ranks.local)


def choose_device(name: str, ranks: Ranks = SINGLE, setting: str = "train.device") -> torch.device:
    """The device of that name; `auto` is a GPU when there is one, and each of several ranks has its own.

    `setting` is what error messages call it: the recipe's key or the option.

    Raises:
        UserError: no such device, or one GPU for several ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{setting}: {name!r} is not a device; use auto, cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{setting}: {name} is not there (GPUs that torch sees: {torch.cuda.device_count()})")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"{setting}: {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not ranks.is_single:
        if device.index is not None:
            raise UserError(f"{setting}: {name} is one GPU, and there are {ranks.count} ranks; use auto or cuda")
        return local_gpu(ranks)
    return device


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rank: int) -> Tensor:
        ctx.rank, ctx.rows = rank, len(values)
        # Neither backend supports bool.
        sent = values.contiguous().view(torch.uint8) if values.dtype == torch.bool else values.contiguous()
        gathered = sent.new_empty(len(values) * dist.get_world_size(), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, sent)
        return gathered.view(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        if gradient.is_cuda:
            local = gradient.new_empty(ctx.rows, *gradient.shape[1:])
            dist.reduce_scatter_tensor(local, gradient)
            return local, None
        # gloo reduces whole tensors only, and in place: the caller's tensor must not change.
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return (gradient,)
