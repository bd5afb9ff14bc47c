"""Processes that train as one: who this one is, and messages between them whose gradients come back.

n ranks hold C/n rows of a batch each. A rank computes a loss ℓ_r such that the loss of the whole batch is their mean,
and gradients are averaged over ranks after the backward pass, as DistributedDataParallel does. Then each message's
gradient is a sum over ranks: what all of them have done with the one tensor that they share.

Axes: C pairs of the whole batch · c = C/n rows of this rank · … anything
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# Before the processes meet: its functions keep the group that they find as a default argument, and with it threads that
# can abort Python's exit. open_clip imports it whenever a model is first asked for.
import torch.distributed.nn
from torch import Tensor
from torch import distributed as dist

from powerclip.errors import UserError

T = TypeVar("T")


class SharedError(UserError):
    """What the user got wrong, known to all ranks: one of them has to say it."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone by default.

    All ranks call the same methods in the same order, as many times; alone, none of them sends anything.
    """

    rank: int = 0
    count: int = 1  # n
    local: int = 0  # among those on this machine: the GPU that is ours

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.count == 1

    @property
    def first(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """Where the `count` rows of this rank lie among those of all."""
        return slice(self.rank * count, (self.rank + 1) * count)

    # Tensors, on their own device.

    def gather(self, values: Tensor) -> Tensor:
        """The rows of all ranks [C, …] from those of this one [c, …], the same number on each; with gradient."""
        return values if self.alone else _Gather.apply(values, self.rank)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a tensor, on all of them; with gradient."""
        return values if self.alone else _Sum.apply(values)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks of a tensor, on all of them; with gradient."""
        return values if self.alone else _Sum.apply(values) / self.count

    def logsumexp(self, values: Tensor) -> Tensor:
        """log Σ_r exp x_r over ranks, element by element, with the maximum taken out; with gradient."""
        if self.alone:
            return values
        highest = self.max(values)
        return highest + self.sum((values - highest).exp()).log()

    @torch.no_grad()
    def max(self, values: Tensor) -> Tensor:
        """The maximum over ranks, element by element; no gradient."""
        if self.alone:
            return values
        highest = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return highest

    @torch.no_grad()
    def exchange(self, values: Tensor) -> Tensor:
        """Hand each rank its rows: of [C, …] the ones that `rows` names, as [n, c, …] from all ranks; no gradient."""
        if self.alone:
            return values.unsqueeze(0)
        received = torch.empty_like(values, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, values.contiguous())
        return received.unflatten(0, (self.count, -1))

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients of parameters that no wrapper looks after by their mean over ranks, in one message."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.alone or not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    # Numbers and objects, between hosts: no GPU is waited for.

    def numbers(self, *values: int) -> list[tuple[int, ...]]:
        """Some whole numbers of each rank, on all of them."""
        if self.alone:
            return [values]
        # A sum with zeros: gloo adds in log n rounds, and gathers in n.
        found = torch.zeros(self.count, len(values), dtype=torch.int64)
        found[self.rank] = torch.tensor(values)
        dist.all_reduce(found)
        return [tuple(row) for row in found.tolist()]

    def collect(self, value: T) -> list[T]:
        """A value of each rank, on all of them."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def most(self, value: int) -> int:
        """The largest of a number that each rank has."""
        return int(self.max(torch.tensor(value)))

    def mean_of(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean over ranks of some numbers, the same names on each."""
        if self.alone:
            return dict(values)
        mean = self.mean(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, mean.tolist(), strict=True))

    def from_first(self, ask: Callable[[], T]) -> T:
        """What the first rank finds, on all of them: only one has to look, and none can find something else."""
        return self.together(lambda: ask() if self.first else None, self.first_of)  # type: ignore[return-value]

    def together(self, action: Callable[[], T], share: Callable[[list[T]], T] | None = None) -> T:
        """What an action gives on this rank. If the user's input fails it on one rank, it fails on all.

        With `share`, what it gives on all of them is made of what it gave on each.
        """
        if self.alone:
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
        given: list[Any] = [answer for _, answer in answers]
        return share(given) if share else result

    @staticmethod
    def first_of(answers: list[T]) -> T:
        """The first rank's."""
        return answers[0]


ALONE = Ranks()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rank: int) -> Tensor:
        ctx.rank, ctx.rows = rank, len(values)
        # Neither backend knows truth values.
        sent = values.contiguous().view(torch.uint8) if values.dtype == torch.bool else values.contiguous()
        gathered = sent.new_empty(len(values) * dist.get_world_size(), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, sent)
        return gathered.view(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        if gradient.is_cuda:
            own = gradient.new_empty(ctx.rows, *gradient.shape[1:])
            dist.reduce_scatter_tensor(own, gradient)
            return own, None
        # gloo reduces whole tensors only; it must not be the caller's own that changes.
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
