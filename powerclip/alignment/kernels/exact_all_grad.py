"""The gradient of all exact scores in Triton: which node wins each set, and how many sets each wins.

R2T of a pair is the mean over sets A of max_t Σ_{m ∈ A} q_tm. So its derivative by q_tm is 2^−M times the number of
sets that hold m and that node t wins. Nothing is kept from the forward; a block of images is differentiated in two
passes.

1. `_winners` enumerates the sets as `exact_all.py` does. Its whole numbers end with the number of the node, counted
   from the caption's last one, so that the maximum brings the winner with it and the first of tied nodes wins. Values
   have 30 bits less those of the longest caption's nodes: 25 at 32 nodes, one more than float32's. Four winners are a
   word.
2. `_similarity_gradients` counts the sets that a node wins, for each region that they hold (`wins.py`): a few
   instructions for four sets. A product of zeros and ones on tensor cores would need none for the sums, but more to
   bring winners into its layout than this takes for all. With T2R's derivative, a closed form, it writes the gradient
   of q as two float16 numbers, which `matmul.py` multiplies back.

By cosine a set counts with its inverse length, and the best sets of `best_sets.py` replace T2R's closed form. The
lengths have a gradient too: a set's is the sum over captions of the best node's sum, each program adding a slab of
them, and over nodes whose best set it is. The latter are added as whole numbers, whose order does not matter: two runs
give the same bits.

Pairs whose score has no gradient are passed over where a tile of images has no other.

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.backends import KernelSettings
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.best_sets import best_sets
from powerclip.alignment.kernels.exact_all import exact_all, largest_sum
from powerclip.alignment.kernels.set_sums import (
    beside_sets,
    larger,
    load_sets,
    max_over_sets,
    middle_sums,
    set_sums,
    store_sets,
    sum_over_sets,
)
from powerclip.alignment.kernels.wins import lengths_won, sets_won
from powerclip.alignment.matmul import by_region, halves, input_gradients, similarities
from powerclip.alignment.ragged import Segments
from powerclip.alignment.recompute import ScoreImpl, recompute, whole_tiles
from powerclip.alignment.regions import inverse_set_lengths

# Four times 2^5 best similarities and 2^5 sums of the present node: 160 of the 255 registers that a thread may have. By
# cosine the gradients of as many lengths as there are best similarities lie beside them: twice 2 · 2^5 and 2^5.
LOW_REGIONS, MIDDLE_REGIONS, MIDDLE_WITH_LENGTHS = 5, 2, 1
TILE_IMAGES, WARPS = 128, 4  # one image for each thread
SLAB = 64  # captions whose gradients of the lengths one program adds; the sums of a chunk are 16 MB
MOST_NODES = 127  # of a caption: a winner is a byte, whose highest bit has to be free
# The nodes whose sets are counted at a time: the winners of a caption are read once for all of them.
SLOTS, SLOTS_WITH_LENGTHS = 4, 2
BLOCK_ELEMENTS = 2**27  # most similarities, or gradients of them, at a time: 512 MB
WINNER_BYTES = 2**28  # of one chunk of captions


def exact_all_with_gradient(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """Q̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D], M ≤ 16, with a gradient."""
    count = regions.shape[1]
    most = BLOCK_ELEMENTS // max(len(nodes) * count, 2**count)
    impl = ScoreImpl(exact_all, _gradient_block, whole_tiles(most, TILE_IMAGES))
    return recompute(regions, nodes, segments, config, impl)


def supports(segments: Segments) -> bool:
    """Whether no caption has more nodes than a winner's byte can tell apart."""
    return segments.longest <= MOST_NODES


@dataclass(frozen=True)
class _Block:
    """What the kernels read for one block of images."""

    q: Tensor  # [T, M, B] float32
    of_scores: Tensor  # [S, B] float32, the largest 1
    inverse: Tensor | None  # [2^M, B] float32, for cosines
    best: Tensor | None  # [T, B] int32: the best sets by cosine, for T2R
    unit: Tensor  # [] float32: a similarity of 1 as a whole number
    bits: int  # of a node's number
    settings: KernelSettings

    @property
    def middle(self) -> int:
        most = MIDDLE_REGIONS if self.inverse is None else MIDDLE_WITH_LENGTHS
        return min(max(self.q.shape[1] - LOW_REGIONS, 0), most)

    @property
    def words(self) -> int:
        """Words of winners of a pair, each of 2^middle bytes."""
        return 2 ** (self.q.shape[1] - self.middle)

    @property
    def set_unit(self) -> float:
        """Of R2T, for each set."""
        return self.settings.r2t_unit / self.settings.sets


def _gradient_block(
    regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's regions [B, M, D] and of the nodes [T, D] for the gradient of its scores [B, S]."""
    images, count, width = regions.shape
    # Float16 ends at 6e-8: in units of the largest gradient of a score, what ends there adds nothing.
    largest = gradient.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    q = similarities(regions, nodes)
    lengths_of, inverse, best, cosines = regions, None, None, None
    if config.divides_by_lengths:
        with torch.enable_grad():
            lengths_of = regions.detach().float().requires_grad_()
            inverse = inverse_set_lengths(lengths_of).T
        if config.t2r:
            cosines, best = best_sets(q, inverse.detach().contiguous(), segments, config)
    bits = max(1, (segments.longest - 1).bit_length())
    block = _Block(
        q=q,
        of_scores=(gradient.float() / largest).T.contiguous(),
        inverse=None if inverse is None else inverse.detach().contiguous(),
        best=best,
        unit=2.0**30 / largest_sum(regions, nodes),
        bits=bits,
        settings=KernelSettings.of(config, count),
    )
    of_q = torch.empty(len(nodes), 2 * count * images, dtype=torch.float16, device=q.device)
    of_inverse = _write_gradients(block, segments, config, of_q)
    of_regions, of_nodes = input_gradients(of_q, halves(nodes), halves(by_region(regions)))
    of_regions = of_regions.view(count, images, width).transpose(0, 1)
    if inverse is not None:
        if cosines is not None:
            of_inverse += _gradient_of_best_lengths(block, cosines, segments)
        of_regions = of_regions + torch.autograd.grad(inverse, lengths_of, of_inverse)[0]
    return (largest * of_regions).to(regions.dtype), of_nodes.mul_(largest).to(nodes.dtype)


def _write_gradients(block: _Block, segments: Segments, config: AlignmentConfig, of_q: Tensor) -> Tensor:
    """Fill the gradient of q, and give that of the inverse lengths by R2T [2^M, B], 0 where they do not count."""
    (_, count, images), captions, device = block.q.shape, len(segments), block.q.device
    offsets, low = segments.offsets, min(count, LOW_REGIONS)
    nowhere = block.q  # in place of what is not read
    of_inverse = torch.zeros(2**count, images, device=device)
    chunk = max(SLAB, WINNER_BYTES // (2**count * images) // SLAB * SLAB) if config.r2t else captions
    kind = (torch.uint8, torch.int16, torch.int32)[block.middle]
    winners = torch.empty(min(chunk, captions) * block.words * images if config.r2t else 1, dtype=kind, device=device)
    sets = {"M": count, "LOW": low, "MIDDLE": block.middle, "LENGTHS": block.inverse is not None}
    slab = 1 if block.inverse is None else SLAB
    highs = 2 ** (count - low - block.middle)
    for begin in range(0, captions, chunk):
        end = min(captions, begin + chunk)
        if config.r2t:
            slabs = triton.cdiv(end - begin, slab)
            sums = of_inverse.new_zeros(slabs, 2**count, images) if block.inverse is not None else nowhere
            _winners[(slabs * highs, triton.cdiv(images, TILE_IMAGES))](
                block.q,
                offsets,
                block.of_scores,
                winners,
                sums,
                block.unit,
                images,
                begin,
                end,
                block.set_unit,
                **sets,
                BITS=block.bits,
                SLAB=slab,
                IMAGES=images if images % TILE_IMAGES == 0 else 0,
                FUSED=block.q.is_cuda,
                TILE_B=TILE_IMAGES,
                num_warps=WARPS,
            )
            if block.inverse is not None:
                of_inverse += sums.sum(0)
        _similarity_gradients[(end - begin, triton.cdiv(images, TILE_IMAGES))](
            block.q,
            offsets,
            block.of_scores,
            winners,
            nowhere if block.inverse is None else block.inverse,
            nowhere if block.best is None else block.best,
            of_q,
            images,
            begin,
            block.settings.t2r_unit,
            block.set_unit,
            **block.settings.switches,
            **sets,
            IMAGES=images if images % TILE_IMAGES == 0 else 0,
            FUSED=block.q.is_cuda,
            TILE_B=TILE_IMAGES,
            SLOTS=SLOTS if block.inverse is None else SLOTS_WITH_LENGTHS,
            num_warps=WARPS,
        )
    return of_inverse


def _gradient_of_best_lengths(block: _Block, cosines: Tensor, segments: Segments) -> Tensor:
    """The gradient of the inverse lengths [2^M, B] by T2R: over the nodes whose best set it is, the sum's weight."""
    assert block.best is not None
    assert block.inverse is not None
    best = block.best.long()
    weights = block.of_scores / segments.lengths_like(block.of_scores) * block.settings.t2r_unit
    inverse = block.inverse.gather(0, best)
    # A best set without a length (∅, or one that cancels) has cosine 0, and its length no gradient.
    terms = weights[segments.index] * cosines / torch.where(inverse > 0, inverse, torch.inf)
    # No term is larger than M. In units of 2^−40 of that 2^22 of them do not leave 63 bits.
    unit = 2.0**40 / block.q.shape[1]
    whole = torch.zeros(block.inverse.shape, dtype=torch.int64, device=best.device)
    return (whole.scatter_add_(0, best, (terms * unit).round().long()).double() / unit).float()


@triton.jit
def _winners(
    q,  # [T, M, B] float32
    offsets,  # [S+1] caption c owns nodes offsets[c] … offsets[c+1]-1
    of_scores,  # [S, B] float32: the gradient of the scores
    winners,  # [captions from `begin` on, 2^(M − MIDDLE), B] words
    of_inverse,  # [slabs, 2^M, B] float32, zero: the gradient of the inverse lengths, where they count
    unit,  # [] float32: a similarity of 1 as a whole number
    images,
    begin,
    end_caption,
    set_unit,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    LENGTHS: tl.constexpr,
    BITS: tl.constexpr,
    SLAB: tl.constexpr,
    IMAGES: tl.constexpr,
    FUSED: tl.constexpr,
    TILE_B: tl.constexpr,
):
    if IMAGES:  # known to the compiler where it is round, as in training
        images = IMAGES
    HIGHS: tl.constexpr = 1 << (M - LOW - MIDDLE)
    slab, high = (tl.program_id(0) // HIGHS).to(tl.int64), tl.program_id(0) % HIGHS
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    valid = image < images
    one_unit = tl.load(unit)
    LAST: tl.constexpr = (1 << BITS) - 1
    nothing = tl.zeros((TILE_B,), tl.int32)
    none = tl.zeros((TILE_B,), tl.float32)
    for _ in tl.static_range(LOW):
        none = tl.join(none, none)
    of_length, of_length_one = none, none
    start = begin + slab * SLAB
    for caption in range(start, tl.minimum(start + SLAB, end_caption)):
        of_score = tl.load(of_scores + caption * images + image, mask=valid, other=0.0)
        if tl.max(tl.abs(of_score), 0) > 0.0:
            first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)
            row = q + first * M * images + image
            sums = set_sums(row, images, valid, one_unit, high, nothing, M, LOW, MIDDLE, BITS)
            one, two = middle_sums(row, images, valid, one_unit, LOW, MIDDLE, BITS, TILE_B)
            # The node's number is added last, in the instruction that adds a middle set and takes the maximum.
            best, best_one = sums + LAST, sums + (one + LAST)
            best_two, best_both = sums + (two + LAST), sums + (one + two + LAST)
            for node in range(first + 1, end):
                row = q + node * M * images + image
                named = LAST - (node - first).to(tl.int32)
                sums = set_sums(row, images, valid, one_unit, high, nothing, M, LOW, MIDDLE, BITS)
                one, two = middle_sums(row, images, valid, one_unit, LOW, MIDDLE, BITS, TILE_B)
                best = larger(sums, beside_sets(nothing + named, LOW), best, FUSED)
                if MIDDLE >= 1:
                    best_one = larger(sums, one + named, best_one, FUSED)
                if MIDDLE == 2:
                    best_two = larger(sums, two + named, best_two, FUSED)
                    best_both = larger(sums, one + two + named, best_both, FUSED)
            together = LAST - (best & LAST)
            if MIDDLE >= 1:
                together |= (LAST - (best_one & LAST)) << 8
            if MIDDLE == 2:
                together |= (LAST - (best_two & LAST)) << 16
                together |= (LAST - (best_both & LAST)) << 24
            word = (caption - begin) * (1 << (M - MIDDLE)) + (high << LOW)
            store_sets(winners + word * images + image, together, images, valid, LOW)
            if LENGTHS:
                weight = beside_sets(of_score, LOW)
                of_length += weight * (best - (best & LAST)).to(tl.float32)
                if MIDDLE == 1:
                    of_length_one += weight * (best_one - (best_one & LAST)).to(tl.float32)
    if LENGTHS:
        to = of_inverse + ((slab << M) + (high << (LOW + MIDDLE))) * images + image
        store_sets(to, of_length * (set_unit / one_unit), images, valid, LOW)
        if MIDDLE == 1:
            store_sets(to + (images << LOW), of_length_one * (set_unit / one_unit), images, valid, LOW)


@triton.jit
def _similarity_gradients(
    q,  # [T, M, B] float32
    offsets,  # [S+1]
    of_scores,  # [S, B] float32: the gradient of the scores
    winners,  # [captions from `begin` on, 2^(M − MIDDLE), B] words
    inverse,  # [2^M, B] float32, where lengths count
    best_sets,  # [T, B] int32, likewise
    of_q,  # [T, 2, M, B] float16: the gradient of q rounded, and what rounding lost
    images,
    begin,
    t2r_unit,
    set_unit,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    LENGTHS: tl.constexpr,
    IMAGES: tl.constexpr,
    FUSED: tl.constexpr,
    TILE_B: tl.constexpr,
    SLOTS: tl.constexpr,
):
    if IMAGES:  # known to the compiler where it is round, as in training
        images = IMAGES
    HIGHS: tl.constexpr = 1 << (M - LOW - MIDDLE)
    caption = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    valid = image < images
    first, end = tl.load(offsets + begin + caption), tl.load(offsets + begin + caption + 1)
    of_score = tl.load(of_scores + (begin + caption) * images + image, mask=valid, other=0.0)
    is_weighted = tl.max(tl.abs(of_score), 0) > 0.0
    at_winners = winners + ((caption << (M - MIDDLE)) * images + image)
    none = tl.zeros((TILE_B,), tl.float32 if LENGTHS else tl.int32)
    for _ in tl.static_range(4):
        none = tl.join(none, none)
    for some in range(first, end, SLOTS):
        name = (some - first).to(tl.int32)
        won, won_b, won_c, won_d = none, none, none, none
        if R2T and is_weighted:
            for high in range(HIGHS):
                words = load_sets(at_winners + (high << LOW) * images, images, valid, LOW).to(tl.int32)
                if LENGTHS:
                    at = inverse + (high << (LOW + MIDDLE)) * images + image
                    length = load_sets(at, images, valid, LOW)
                    length_one = length
                    if MIDDLE == 1:
                        length_one = load_sets(at + (images << LOW), images, valid, LOW)
                    won += lengths_won(words, length, length_one, name, high, M, LOW, MIDDLE, TILE_B)
                    if SLOTS > 1:
                        won_b += lengths_won(words, length, length_one, name + 1, high, M, LOW, MIDDLE, TILE_B)
                else:
                    if MIDDLE < 2:
                        # The bytes that are not there name a node that no caption has.
                        words = (words & ((1 << (8 << MIDDLE)) - 1)) | (0x7F7F7F7F << (8 << MIDDLE) & 0x7F7F7F7F)
                    won += sets_won(words, name, high, M, LOW, MIDDLE, TILE_B, FUSED)
                    if SLOTS > 1:
                        won_b += sets_won(words, name + 1, high, M, LOW, MIDDLE, TILE_B, FUSED)
                    if SLOTS > 2:
                        won_c += sets_won(words, name + 2, high, M, LOW, MIDDLE, TILE_B, FUSED)
                        won_d += sets_won(words, name + 3, high, M, LOW, MIDDLE, TILE_B, FUSED)
        for slot in tl.static_range(SLOTS):
            node = some + slot
            real = valid & (tl.zeros((TILE_B,), tl.int32) + name + slot < (end - first).to(tl.int32))
            of_node = (won if slot == 0 else won_b) if slot < 2 else (won_c if slot == 2 else won_d)
            gradient = of_node.to(tl.float32) * beside_sets(set_unit * of_score, 4)
            if T2R:
                of_best = of_score * t2r_unit / (end - first).to(tl.float32)
                if LENGTHS:
                    number = tl.load(best_sets + node * images + image, mask=real, other=0)
                    length_of_best = tl.load(inverse + number * images + image, mask=real, other=0.0)
                    slope = _members(number, 0, 4).to(tl.float32) * beside_sets(length_of_best, 4)
                else:
                    value = _load_regions(q + node * M * images + image, images, real, M, 0, 4, TILE_B)
                    slope = _best_set_slope(value, EMPTY, SINGLE)
                gradient += slope * beside_sets(of_best, 4)
            to = of_q + 2 * node * M * images + image
            rounded = gradient.to(tl.float16)
            _store_regions(to, rounded, images, real, M, 0, 4)
            lost = (gradient - rounded.to(tl.float32)).to(tl.float16)
            _store_regions(to + M * images, lost, images, real, M, 0, 4)


@triton.jit
def _members(number, REGION: tl.constexpr, AXES: tl.constexpr):
    """Which regions the sets with these numbers [B] have: ones and zeros [B, 2, …, 2], from REGION on."""
    if AXES > 0:
        upper: tl.constexpr = REGION + (1 << (AXES - 1))
        values = tl.join(_members(number, REGION, AXES - 1), _members(number, upper, AXES - 1))
    else:
        values = (number >> REGION) & 1
    return values


@triton.jit
def _load_regions(at, stride, valid, M: tl.constexpr, REGION: tl.constexpr, AXES: tl.constexpr, TILE_B: tl.constexpr):
    """Similarities with the regions from REGION on, side by side [B, 2, …, 2]; −∞ beyond M."""
    if AXES > 0:
        upper: tl.constexpr = REGION + (1 << (AXES - 1))
        values = tl.join(
            _load_regions(at, stride, valid, M, REGION, AXES - 1, TILE_B),
            _load_regions(at, stride, valid, M, upper, AXES - 1, TILE_B),
        )
    elif REGION < M:
        values = tl.load(at + REGION * stride, mask=valid, other=0.0)
    else:
        values = tl.full((TILE_B,), -float("inf"), tl.float32)
    return values


@triton.jit
def _store_regions(to, values, stride, valid, M: tl.constexpr, REGION: tl.constexpr, AXES: tl.constexpr):
    """Write what belongs to regions up to M."""
    if AXES > 0:
        lower, higher = tl.split(values)
        upper: tl.constexpr = REGION + (1 << (AXES - 1))
        _store_regions(to, lower, stride, valid, M, REGION, AXES - 1)
        _store_regions(to, higher, stride, valid, M, upper, AXES - 1)
    elif REGION < M:
        tl.store(to + REGION * stride, values, mask=valid)


@triton.jit
def _best_set_slope(q, EMPTY: tl.constexpr, SINGLE: tl.constexpr):
    """The derivative [B, 2, 2, 2, 2] of the best set's sum; regions that are tied for the highest share it."""
    highest = beside_sets(max_over_sets(q, 4), 4)
    is_highest = tl.where(q == highest, 1.0, 0.0)
    slope = is_highest / beside_sets(sum_over_sets(is_highest, 4), 4)
    if not SINGLE:
        slope = tl.where(highest > 0.0, tl.where(q > 0.0, 1.0, 0.0), slope)
    if EMPTY:
        slope = tl.where(highest > 0.0, slope, 0.0)
    return slope
