"""Random instances for the tests of the mathematics."""

import torch
import torch.nn.functional as F

from powerclip.alignment import Parts, Phrases
from powerclip.alignment.contrast import off_diagonal
from powerclip.alignment.ragged import Segments


def random_trees(captions: int, seed: int, length: int = 12) -> Phrases:
    """Random packed trees: leaves of one to three tokens, nodes that are ranges of leaves, the root among them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    words = torch.zeros(captions, length, dtype=torch.bool)
    leaves, nodes, leaf_counts, node_counts = [], [], [], []
    for caption in range(captions):
        start, own = 1, []
        while start < length - 1 and len(own) < 5:
            end = min(length - 1, start + draw(1, 3))
            own.append((start, end))
            words[caption, start:end] = True
            start = end
        spans = {(0, len(own))}
        for _ in range(draw(0, 6)):
            first = draw(0, len(own) - 1)
            spans.add((first, draw(first + 1, len(own))))
        leaves += own
        nodes += sorted(spans)
        leaf_counts.append(len(own))
        node_counts.append(len(spans))
    leaf, node = torch.tensor(leaves), torch.tensor(nodes)
    return Phrases(
        words=words,
        leaf_start=leaf[:, 0],
        leaf_end=leaf[:, 1],
        leaf_offsets=F.pad(torch.tensor(leaf_counts).cumsum(0), (1, 0)),
        node_start=node[:, 0],
        node_end=node[:, 1],
        node_offsets=F.pad(torch.tensor(node_counts).cumsum(0), (1, 0)),
        max_leaves=max(leaf_counts),
        max_nodes=max(node_counts),
    )


def random_segments(groups: int, seed: int, most: int = 6) -> Segments:
    """Groups of one to `most` members."""
    generator = torch.Generator().manual_seed(seed)
    return Segments.from_lengths(torch.randint(1, most + 1, (groups,), generator=generator))


def random_similarities(segments: Segments, images: int, regions: int, seed: int, spread: float = 0.5) -> torch.Tensor:
    """Similarities q [T, B, M] in float64, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(segments.index), images, regions)
    return spread * torch.randn(shape, dtype=torch.float64, generator=generator)


def random_parts(pairs: int, regions: int, width: int, seed: int, dtype: torch.dtype = torch.float64) -> Parts:
    """Embedded regions and nodes that ask for a gradient."""
    segments = random_segments(pairs, seed)
    generator = torch.Generator().manual_seed(seed)
    region = F.normalize(torch.randn(pairs, regions, width, dtype=dtype, generator=generator), dim=-1)
    node = torch.randn(len(segments.index), width, dtype=dtype, generator=generator)
    return Parts(region.requires_grad_(), node.requires_grad_(), segments)


def hardest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Columns [C, k] of each row's k highest scores off the diagonal of a matrix."""
    size = len(scores)
    index = off_diagonal(scores).topk(min(k, size - 1)).indices
    # Back from columns that skip the diagonal to columns of the matrix.
    return index + (index >= torch.arange(size).unsqueeze(-1))
