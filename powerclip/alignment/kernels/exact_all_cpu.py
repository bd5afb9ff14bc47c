"""Exact scores of all pairs on a CPU, in blocks; the backward enumerates the sets again and counts winners.

R2T of a pair is the mean over sets A of max_t Σ_{m ∈ A} q_tm, so its derivative by q_tm is the share of the sets that
hold m and that node t wins: a histogram, as the product of the members of the sets with the 0/1 matrix of the sets that
t wins. The first of tied nodes wins. By cosine each set counts with its inverse length; that is the same for all nodes,
so the winners are those by sums, and the gradient of the lengths goes back to the regions through their Gram matrix.
T2R by sums needs no sets. By cosine it takes the best of a node's 2^M.

Sums over sets come from doubling, (s) → (s, s + q_m): one addition a set. Buffers hold the sets of so few pairs that
they stay in the cache, and nothing of C² × 2^M is ever in memory.

Axes: T nodes of all captions · B images · M regions · S captions · n captions of a chunk · D width
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.backends import KernelSettings, unsupported_setting
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.ragged import Segments, segment_mean
from powerclip.alignment.recompute import ScoreImpl, recompute
from powerclip.alignment.regions import inverse_set_lengths, subset_matrix

BLOCK_ELEMENTS = 2**21  # most similarities q of one block of images
CHUNK_ELEMENTS = 2**17  # sums over sets at a time: with the best ones a megabyte, what a core's own cache holds
MOST_IMAGES = 128  # of a block: with more, a chunk is less than a caption at M = 9


def supports(config: AlignmentConfig) -> bool:
    """Whether these settings are the ones that this file differentiates."""
    enumerates = config.r2t or config.divides_by_lengths  # T2R by sums has a closed form
    return config.aggregation == "exact" and enumerates and unsupported_setting(config) is None


def exact_all_cpu(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """Q̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D]."""
    impl = ScoreImpl(_forward, _gradient_block, _block_size(regions, nodes))
    return recompute(regions, nodes, segments, config, impl)


def _forward(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    blocks = regions.split(_block_size(regions, nodes))
    return torch.cat([_score_block(block, nodes, segments, config) for block in blocks])


def _block_size(regions: Tensor, nodes: Tensor) -> int:
    count = regions.shape[1]
    fitting = min(BLOCK_ELEMENTS // (len(nodes) * count), 4 * CHUNK_ELEMENTS // 2**count)
    return max(1, min(fitting, MOST_IMAGES))


class _ByPosition(NamedTuple):
    """Nodes in another order: the first of every caption, then the second …; captions with the most nodes first.

    Then the nodes at one position of neighbouring captions are neighbours, and no rectangle is padded.
    """

    captions: Tensor  # [S] their order
    nodes: Tensor  # [T] likewise
    starts: list[int]  # of each position's nodes
    counts: list[int]  # captions that have a node at each position

    @classmethod
    def of(cls, segments: Segments) -> _ByPosition:
        lengths, captions = segments.lengths.sort(descending=True, stable=True)
        first = (segments.lengths.cumsum(0) - segments.lengths)[captions]
        counts = [int((lengths > position).sum()) for position in range(segments.longest)]
        nodes = torch.cat([first[:count] + position for position, count in enumerate(counts)])
        return cls(captions, nodes, [sum(counts[:position]) for position in range(len(counts))], counts)

    def of_chunk(self, first: int, end: int) -> Iterator[tuple[int, slice, int]]:
        """For captions `first` to `end`: each position, its nodes, and how many of the captions have one there."""
        for position, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            if count <= first:
                return
            some = min(count, end) - first
            yield position, slice(start + first, start + first + some), some


class _Sets(NamedTuple):
    """The sets of a block's regions."""

    members: Tensor  # [M, 2^M] zeros and ones
    inverse: Tensor | None  # [2^M, 1, B] inverse lengths, for cosines
    bounded: Tensor  # the numbers of those that T2R's best one is among

    @classmethod
    def of(cls, count: int, inverse: Tensor | None, config: AlignmentConfig, dtype: torch.dtype) -> _Sets:
        members = subset_matrix(count)
        sizes = members.sum(-1)
        allowed = (sizes <= (config.largest_set or count)) & (sizes >= (0 if config.empty_set else 1))
        inverse = None if inverse is None else inverse.T.unsqueeze(1).contiguous()
        return cls(members.T.to(dtype), inverse, allowed.nonzero().squeeze(-1))

    def cosines(self, sums: Tensor) -> Tensor:
        """Cosines […, n, B] of some nodes with the sets that T2R's best one is among, from the sums [2^M, n, B]."""
        assert self.inverse is not None
        if len(self.bounded) >= len(sums) - 1:  # all of them, or all but ∅: a view
            return sums[-len(self.bounded) :] * self.inverse[-len(self.bounded) :]
        return sums[self.bounded] * self.inverse[self.bounded]


class _Enumeration:
    """All sets of one block's regions with all nodes, in chunks of captions whose sums over sets stay in the cache."""

    def __init__(self, q: Tensor, order: _ByPosition, sets: _Sets, config: AlignmentConfig):
        self.q = q  # [M, T, B], nodes by position
        self.order, self.sets, self.config = order, sets, config
        self.enumerates_t2r = config.t2r and sets.inverse is not None  # by sums it has a closed form
        self.captions = max(1, CHUNK_ELEMENTS // (2 ** len(q) * q.shape[-1]))  # of a chunk
        shape = 2 ** len(q) * self.captions * q.shape[-1]
        self._sums, self._best = q.new_empty(shape), q.new_empty(shape)
        position = torch.uint8 if len(order.counts) <= 256 else torch.int32
        self._winner = torch.empty(shape, dtype=position)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Captions from the one number to the other."""
        total = len(self.order.captions)
        return ((first, min(total, first + self.captions)) for first in range(0, total, self.captions))

    def sums(self, at: slice) -> Tensor:
        """Sums [2^M, n, B] of some nodes' similarities over all sets, until the next call."""
        q = self.q[:, at]
        sums = self._sums[: 2 ** len(q) * q[0].numel()].view(-1, *q.shape[1:])
        sums[0] = 0
        for region, of_region in enumerate(q):
            torch.add(sums[: 2**region], of_region, out=sums[2**region : 2 ** (region + 1)])
        return sums

    def best(self, first: int, end: int) -> Tensor:
        """The best node's sum [2^M, n, B] of each set."""
        best = self._of_chunk(self._best, end - first)
        for position, at, some in self.order.of_chunk(first, end):
            sums = self.sums(at)
            torch.maximum(best[:, :some], sums, out=best[:, :some]) if position else best.copy_(sums)
        return best

    def winners(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The same, and the winner's position in its caption: the first one's where several are best."""
        best, winner = (self._of_chunk(buffer, end - first) for buffer in (self._best, self._winner))
        winner.zero_()
        for position, at, some in self.order.of_chunk(first, end):
            sums = self.sums(at)
            if position:
                # A later winner has a higher position: a product and a maximum, a tenth of masked_fill's time.
                won = (sums > best[:, :some]).to(winner.dtype).mul_(position)
                torch.maximum(winner[:, :some], won, out=winner[:, :some])
                torch.maximum(best[:, :some], sums, out=best[:, :some])
            else:
                best.copy_(sums)
        return best, winner

    def _of_chunk(self, buffer: Tensor, captions: int) -> Tensor:
        shape = (self.sets.members.shape[1], captions, self.q.shape[-1])
        return buffer[: math.prod(shape)].view(shape)


def _score_block(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    inverse = inverse_set_lengths(regions) if config.divides_by_lengths else None
    order, all_sets = _enumerate(regions, nodes, segments, inverse, config)
    settings, sets = KernelSettings.of(config, regions.shape[1]), all_sets.sets
    of_sets = regions.new_zeros(len(segments), len(regions))  # captions in their new order, as nodes
    of_nodes = regions.new_zeros(len(nodes), len(regions))
    if config.t2r and not all_sets.enumerates_t2r:
        of_nodes = _best_set(all_sets.q, config)
    for first, end in all_sets.chunks():
        if config.r2t:
            best = all_sets.best(first, end)
            of_sets[first:end] = (best if sets.inverse is None else best * sets.inverse).sum(0)
        if all_sets.enumerates_t2r:
            for _, at, _ in order.of_chunk(first, end):
                of_nodes[at] = sets.cosines(all_sets.sums(at)).amax(0)
    scores = settings.r2t_unit / settings.sets * torch.empty_like(of_sets).index_copy_(0, order.captions, of_sets)
    best_sets = torch.empty_like(of_nodes).index_copy_(0, order.nodes, of_nodes)
    return (scores + settings.t2r_unit * segment_mean(best_sets, segments)).T


def _gradient_block(
    regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's regions [B, M, D] and of the nodes [T, D] for the gradient of its scores [B, S]."""
    inverse: Tensor | None = None
    if config.divides_by_lengths:
        with torch.enable_grad():
            lengths_of = regions.detach().requires_grad_()
            inverse = inverse_set_lengths(lengths_of)
    order, all_sets = _enumerate(regions, nodes, segments, inverse, config)
    settings = KernelSettings.of(config, regions.shape[1])
    of_scores = gradient.T[order.captions]  # [S, B]
    of_best = settings.t2r_unit * of_scores / segments.lengths_like(of_scores)[order.captions]
    of_best = torch.cat([of_best[:count] for count in order.counts])  # [T, B]
    if config.t2r and not all_sets.enumerates_t2r:
        of_q = torch.stack([of_best * weight for weight in _best_set_weights(all_sets.q, config)])
    else:
        of_q = torch.zeros_like(all_sets.q)
    of_inverse = torch.zeros(all_sets.sets.members.shape[1], len(regions), dtype=regions.dtype)
    for first, end in all_sets.chunks():
        if not of_scores[first:end].any():
            continue
        if config.r2t:
            weight = settings.r2t_unit / settings.sets * of_scores[first:end]
            _add_winners(of_q, of_inverse, all_sets, (first, end), weight)
        if all_sets.enumerates_t2r:
            for _, at, _ in order.of_chunk(first, end):
                _add_best_sets(of_q[:, at], of_inverse, all_sets, at, of_best[at])
    rows = nodes[order.nodes]
    of_regions = torch.stack([of_region.T @ rows for of_region in of_q], 1)
    of_rows = of_q[0] @ regions[:, 0]
    for of_region, region in zip(of_q[1:], regions.unbind(1)[1:], strict=True):
        of_rows.addmm_(of_region, region)
    if inverse is not None:
        of_regions += torch.autograd.grad(inverse, lengths_of, of_inverse.T)[0]
    return of_regions, torch.empty_like(nodes).index_copy_(0, order.nodes, of_rows)


def _enumerate(
    regions: Tensor, nodes: Tensor, segments: Segments, inverse: Tensor | None, config: AlignmentConfig
) -> tuple[_ByPosition, _Enumeration]:
    order = _ByPosition.of(segments)
    q = nodes[order.nodes] @ regions.permute(1, 2, 0)  # [M, T, B]
    sets = _Sets.of(regions.shape[1], None if inverse is None else inverse.detach(), config, regions.dtype)
    return order, _Enumeration(q, order, sets, config)


def _add_winners(
    of_q: Tensor, of_inverse: Tensor, all_sets: _Enumeration, captions: tuple[int, int], weight: Tensor
) -> None:
    """Add R2T's gradient by q [M, T, B] and by inverse lengths [2^M, B]; `weight` [n, B] is that of each set's best."""
    sets, (first, end) = all_sets.sets, captions
    best, winner = all_sets.winners(first, end)
    for position, at, some in all_sets.order.of_chunk(first, end):
        won = (winner[:, :some] == position).to(of_q.dtype)
        if sets.inverse is not None:
            won *= sets.inverse
        of_q[:, at] += weight[:some] * (sets.members @ won.flatten(1)).unflatten(1, (some, -1))
    if sets.inverse is not None:
        of_inverse += (best * weight).sum(1)


def _add_best_sets(of_q: Tensor, of_inverse: Tensor, all_sets: _Enumeration, at: slice, of_best: Tensor) -> None:
    """Add T2R's gradient by cosine for some nodes: by q [M, n, B] and by inverse lengths; `of_best` [n, B]."""
    sums, sets = all_sets.sums(at), all_sets.sets
    assert sets.inverse is not None
    best = sets.bounded[sets.cosines(sums).argmax(0)]  # [n, B] numbers of sets: the first of several best ones
    of_sum = of_best * sets.inverse.squeeze(1).gather(0, best)
    of_q += of_sum * (best >> torch.arange(len(of_q)).view(-1, 1, 1) & 1)
    of_inverse.scatter_add_(0, best, of_best * sums.gather(0, best.unsqueeze(0)).squeeze(0))


def _best_set(q: Tensor, config: AlignmentConfig) -> Tensor:
    """The best set's sum [T, B] for each node: all positive regions or the highest one. Without ∅ it is never empty."""
    highest = q.amax(0)
    if config.largest_set:
        return F.relu(highest) if config.empty_set else highest
    positive = F.relu(q).sum(0)
    return positive if config.empty_set else torch.where(highest > 0, positive, highest)


def _best_set_weights(q: Tensor, config: AlignmentConfig) -> Tensor:
    """∂ `_best_set` / ∂ q_m [M, T, B]; regions that are tied for the highest share it."""
    highest = q.amax(0)
    tied = (q == highest).to(q.dtype)
    of_highest, positive = tied / tied.sum(0), (q > 0).to(q.dtype)
    if config.empty_set:
        return torch.where(highest > 0, of_highest, 0.0) if config.largest_set else positive
    return of_highest if config.largest_set else torch.where(highest > 0, positive, of_highest)
