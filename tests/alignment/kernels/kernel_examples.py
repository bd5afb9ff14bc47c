"""Where kernels can go wrong: ragged, lopsided and extreme instances, and the float64 reference beside them."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.ragged import Segments
from powerclip.alignment.score import score_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Instance:
    regions: torch.Tensor  # [B, M, D] float32
    nodes: torch.Tensor  # [T, D] float32
    segments: Segments


def instance(lengths: list[int], images: int, regions: int, width: int = 20, seed: int = 0) -> Instance:
    """Random unit regions, and nodes that are sums of a few unit vectors."""
    generator = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> torch.Tensor:
        return F.normalize(torch.randn(*shape, width, generator=generator), dim=-1)

    sizes = torch.randint(1, 6, (sum(lengths), 1), generator=generator)
    nodes = unit(sum(lengths)) * sizes.sqrt()
    segments = Segments.from_lengths(torch.tensor(lengths, device=DEVICE))
    return Instance(unit(images, regions).to(DEVICE), nodes.to(DEVICE), segments)


def _all_equal() -> Instance:
    one = instance([3, 5], 3, 4)
    return replace(one, regions=one.regions[:1, :1].expand(3, 4, -1), nodes=one.nodes[:1].expand(8, -1))


def _of_sign(sign: float, size: float = 1.0) -> Instance:
    """All similarities of one sign: all vectors near one axis, the nodes pointing away from it or along it."""
    one = instance([2, 1, 4], 5, 6)
    axis = torch.ones_like(one.nodes[0])
    return replace(
        one,
        regions=F.normalize(one.regions + axis, dim=-1),
        nodes=sign * size * F.normalize(one.nodes + 2 * axis, dim=-1),
    )


# Few tiles, but every kind of remainder: images, nodes, width, captions longer than a tile of nodes.
INSTANCES = {
    "ragged, odd": lambda: instance([1, 7, 3, 12, 2, 9, 1, 30], 17, 10, width=70),
    "ragged, few": lambda: instance([1, 7, 2], 5, 6, width=35),
    "one node each": lambda: instance([1] * 9, 7, 5),
    "64 nodes": lambda: instance([1, 64, 2], 5, 3),
    "one region": lambda: instance([4, 2], 5, 1),
    "one image": lambda: instance([4, 2, 3], 1, 7),
    "all equal": _all_equal,
    "all negative": lambda: _of_sign(-1.0),
    "barely negative": lambda: _of_sign(-1.0, 0.005),
    "all positive": lambda: _of_sign(1.0),
    "huge": lambda: _of_sign(1.0, 60.0),
    "hugely negative": lambda: _of_sign(-1.0, 60.0),
    "zero": lambda: replace(instance([2, 3], 4, 5), nodes=torch.zeros(5, 20, device=DEVICE)),
}

CONFIGS = {
    "default": AlignmentConfig(),
    "any set": AlignmentConfig(largest_set=0),
    "paper": AlignmentConfig.named("paper"),
    "soft": AlignmentConfig(tau=0.1, largest_set=0),
    "soft, empty set, sums": AlignmentConfig(tau=0.3, largest_set=0, empty_set=True, similarity="sum", alpha=0.3),
    "very soft": AlignmentConfig(tau=3.0, largest_set=0),
    "no R2T": AlignmentConfig(r2t=False, largest_set=0),
    "no T2R": AlignmentConfig(t2r=False, alpha=1.0),
    "best region": AlignmentConfig(largest_set=1),
    "best region, empty set": AlignmentConfig.named("paper", largest_set=1),
}


TIED = {"all equal", "zero"}  # which of several best regions gets the gradient is anyone's choice


def gradients(score, one: Instance, config: AlignmentConfig, dtype: torch.dtype) -> list[torch.Tensor]:
    """The scores of `score(regions, nodes, segments, config)`, and its gradients for a random weighting of them."""
    regions, nodes = one.regions.to(dtype).requires_grad_(), one.nodes.to(dtype).requires_grad_()
    scores = score(regions, nodes, one.segments, config)
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [scores.detach(), *torch.autograd.grad((scores * weights.to(scores)).sum(), [regions, nodes])]


def reference(instance: Instance, config: AlignmentConfig) -> torch.Tensor:
    """The scores [B, S] in float64 by the plain formulas."""
    plain = AlignmentConfig(**{**vars(config), "backend": "reference"})
    return score_all(instance.regions.double(), instance.nodes.double(), instance.segments, plain)


def assert_scores(scores: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the largest score: a score may be a small difference of large numbers."""
    assert scores.shape == expected.shape
    scale = max(expected.abs().max().item(), 1e-3)
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=tolerance * scale)
