"""The gradient of all exact scores in Triton: which node wins each set, and the winners counted by tensor cores.

R2T of a pair is the mean over sets A of max_t Σ_{m ∈ A} q_tm. So its derivative by q_tm is 2^−M times the number of
sets that hold m and that node t wins. Nothing is kept from the forward; a block of images is differentiated in two
passes.

1. `_winners` enumerates the sets as `exact_all.py` does. Its whole numbers end with the number of the node, counted
   from the caption's last one, so that the maximum brings the winner with it and the first of tied nodes wins. Values
   have 30 bits less those of the longest caption's nodes: 25 at 32 nodes, one more than float32's. Four winners are a
   word.
2. `_similarity_gradients` counts: a product of the members of the sets, M × 2^M zeros and ones, with the sets that a
   node wins, 2^M × images. Both are exact in float16, and so are counts up to 2^24 in float32. With T2R's derivative,
   a closed form, it writes the gradient of q as two float16 numbers, which `matmul.py` multiplies back.

By cosine a set counts with its inverse length, as two float16 numbers again, and the best sets of `best_sets.py`
replace T2R's closed form. The lengths have a gradient too: a set's is the sum over captions of the best node's sum,
each program adding a slab of them, and over nodes whose best set it is. The latter are added as whole numbers, whose
order does not matter: two runs give the same bits.

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
from powerclip.alignment.kernels.set_sums import beside_sets, larger, middle_sums, set_sums, store_sets
from powerclip.alignment.matmul import by_region, halves, input_gradients, similarities
from powerclip.alignment.ragged import Segments
from powerclip.alignment.recompute import ScoreImpl, recompute, whole_tiles
from powerclip.alignment.regions import inverse_set_lengths

# Four times 2^5 best similarities and 2^5 sums of the present node: 160 of the 255 registers that a thread may have. By
# cosine the gradients of as many lengths as there are best similarities lie beside them: twice 2 · 2^5 and 2^5.
LOW_REGIONS, MIDDLE_REGIONS, MIDDLE_WITH_LENGTHS = 5, 2, 1
TILE_IMAGES, WARPS = 128, 4  # one image for each thread
SLAB = 64  # captions whose gradients of the lengths one program adds; the sums of a chunk are 16 MB
MOST_NODES = 256  # of a caption: a winner is a byte
# Columns of the counting product are SLOTS nodes × 32 images. For 16 × 128 counts, 16 × 128 words, and four times as
# many winners on their way to the tensor cores a thread has 166 registers, as ptxas counts for sm_90. Twice the words
# spill; so do lengths, in two halves, for more than two nodes at a time. The winners of a caption are read once for
# every SLOTS nodes.
COUNTED_IMAGES, SLOTS, SLOTS_WITH_LENGTHS, TILE_WORDS = 32, 4, 2, 16
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
        unit=2.0 ** (30 - bits) / largest_sum(regions, nodes),
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
        _similarity_gradients[(end - begin, triton.cdiv(images, COUNTED_IMAGES))](
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
            TILE_M=16,
            TILE_W=TILE_WORDS,
            TILE_B=COUNTED_IMAGES,
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
    last = tl.full((TILE_B,), LAST, tl.int32)
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
            sums = set_sums(row, images, valid, one_unit, high, last, M, LOW, MIDDLE, BITS)
            one, two = middle_sums(row, images, valid, one_unit, LOW, MIDDLE, BITS, TILE_B)
            best, best_one, best_two, best_both = sums, sums + one, sums + two, sums + (one + two)
            for node in range(first + 1, end):
                row = q + node * M * images + image
                named = last - (node - first).to(tl.int32)
                sums = set_sums(row, images, valid, one_unit, high, named, M, LOW, MIDDLE, BITS)
                one, two = middle_sums(row, images, valid, one_unit, LOW, MIDDLE, BITS, TILE_B)
                best = tl.maximum(best, sums)
                if MIDDLE >= 1:
                    best_one = larger(sums, one, best_one, FUSED)
                if MIDDLE == 2:
                    best_two = larger(sums, two, best_two, FUSED)
                    best_both = larger(sums, one + two, best_both, FUSED)
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
                of_length += weight * (best >> BITS).to(tl.float32)
                if MIDDLE == 1:
                    of_length_one += weight * (best_one >> BITS).to(tl.float32)
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
    TILE_M: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_B: tl.constexpr,
    SLOTS: tl.constexpr,
):
    WORDS: tl.constexpr = 1 << (M - MIDDLE)
    caption = tl.program_id(0).to(tl.int64)
    # Columns: the images of a tile, for one node after the other.
    column = tl.arange(0, SLOTS * TILE_B)
    image = tl.program_id(1) * TILE_B + column % TILE_B
    valid = image < images
    first, end = tl.load(offsets + begin + caption), tl.load(offsets + begin + caption + 1)
    of_score = tl.load(of_scores + (begin + caption) * images + image, mask=valid, other=0.0)
    is_weighted = tl.max(tl.abs(of_score), 0) > 0.0
    region = tl.arange(0, TILE_M)[:, None]
    is_region = region < M
    for some in range(first, end, SLOTS):
        node = some + column // TILE_B
        real = valid & (node < end)
        gradient = tl.zeros((TILE_M, SLOTS * TILE_B), tl.float32)
        if is_weighted:
            if R2T:
                wanted = tl.where(real, (node - first).to(tl.int32), 256)[None, :]
                for start in range(0, WORDS, TILE_W):
                    at = start + tl.arange(0, TILE_W)
                    there = (at < WORDS)[:, None] & valid[None, :]
                    word = tl.load(winners + (caption * WORDS + at)[:, None] * images + image[None, :], there, other=0)
                    for part in tl.static_range(1 << MIDDLE):
                        # Words are numbered by the lowest and the highest regions of their sets.
                        number = (at & ((1 << LOW) - 1)) | (part << LOW) | ((at >> LOW) << (LOW + MIDDLE))
                        member = ((number[None, :] >> region) & 1).to(tl.float16)
                        won = there & (((word.to(tl.int32) >> (8 * part)) & 255) == wanted)
                        if LENGTHS:
                            length = tl.load(inverse + number[:, None] * images + image[None, :], won, other=0.0)
                            rounded = length.to(tl.float16)
                            gradient = tl.dot(member, rounded, gradient)
                            lost = (length - rounded.to(tl.float32)).to(tl.float16)
                            gradient = tl.dot(member, lost, gradient)
                        else:
                            gradient = tl.dot(member, won.to(tl.float16), gradient)
                gradient *= (set_unit * of_score)[None, :]
            if T2R:
                of_best = of_score * t2r_unit / (end - first).to(tl.float32)
                if LENGTHS:
                    number = tl.load(best_sets + node * images + image, mask=real, other=0)
                    length = tl.load(inverse + number * images + image, mask=real, other=0.0)
                    gradient += ((number[None, :] >> region) & 1).to(tl.float32) * (of_best * length)[None, :]
                else:
                    there = is_region & real[None, :]
                    value = tl.load(
                        q + (node * M)[None, :] * images + region * images + image[None, :], there, other=0.0
                    )
                    gradient += _best_set_slope(value, is_region, EMPTY, SINGLE) * of_best[None, :]
        rounded = gradient.to(tl.float16)
        to = of_q + (2 * node * M)[None, :] * images + region * images + image[None, :]
        tl.store(to, rounded, mask=is_region & real[None, :])
        lost = (gradient - rounded.to(tl.float32)).to(tl.float16)
        tl.store(to + M * images, lost, mask=is_region & real[None, :])


@triton.jit
def _best_set_slope(q, is_region, EMPTY: tl.constexpr, SINGLE: tl.constexpr):
    """The derivative [M, columns] of the best set's sum; regions that are tied for the highest share it."""
    highest = tl.max(tl.where(is_region, q, -float("inf")), 0)[None, :]
    is_highest = tl.where(is_region & (q == highest), 1.0, 0.0)
    slope = is_highest / tl.sum(is_highest, 0)[None, :]
    if not SINGLE:
        slope = tl.where(highest > 0.0, tl.where(q > 0.0, 1.0, 0.0), slope)
    if EMPTY:
        slope = tl.where(highest > 0.0, slope, 0.0)
    return slope
