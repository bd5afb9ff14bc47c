"""The silhouettes: for each shape a function that is negative inside, positive outside, and near the edge a distance.

Coordinates are in radii of the object: u to the right, v downwards, the object around (0, 0), within the box that
`vocabulary.SHAPES` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _circle(u: Tensor, v: Tensor) -> Tensor:
    return torch.hypot(u, v) - 1


def _square(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs()) - 0.88


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    side = (1.8 * u.abs() - (v + 1)) / math.hypot(1.8, 1)
    return torch.maximum(side, v - 0.8)


def _star(u: Tensor, v: Tensor) -> Tensor:
    # Fold the plane onto half of one point; the edge then runs from the tip (1, 0°) to the notch (0.42, 36°).
    sector = math.pi / 5
    angle = torch.atan2(u, -v)
    angle = (torch.remainder(angle + sector, 2 * sector) - sector).abs()
    radius = torch.hypot(u, v)
    along, beside = radius * angle.cos(), radius * angle.sin()
    nx, ny = 0.42 * math.sin(sector), 1 - 0.42 * math.cos(sector)
    return ((along - 1) * nx + beside * ny) / math.hypot(nx, ny)


def _cross(u: Tensor, v: Tensor) -> Tensor:
    u, v = u.abs(), v.abs()
    return torch.minimum(torch.maximum(u - 1, v - 0.34), torch.maximum(u - 0.34, v - 1))


def _ring(u: Tensor, v: Tensor) -> Tensor:
    return (torch.hypot(u, v) - 0.74).abs() - 0.26


def _heart(u: Tensor, v: Tensor) -> Tensor:
    # Two lobes, and the wedge between the tangents from the tip (0, 0.95) to them.
    cx, cy, r, tip = 0.47, -0.38, 0.53, 0.95
    u = u.abs()
    lobe = torch.hypot(u - cx, v - cy) - r
    reach = math.hypot(cx, tip - cy)
    turn = math.atan2(cx, tip - cy) + math.asin(r / reach)  # between the axis and the tangent
    nx, ny = math.cos(turn), math.sin(turn)
    tangent = u * nx + (v - tip) * ny
    below_lobe = -((v - cy) * nx - (u - cx) * ny)
    wedge = torch.maximum(torch.maximum(tangent, below_lobe), cy - 0.2 - v)
    return torch.minimum(lobe, wedge)


def _diamond(u: Tensor, v: Tensor) -> Tensor:
    return (u.abs() + 0.85 * v.abs() - 0.85) / math.hypot(1, 0.85)


def _moon(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(torch.hypot(u, v) - 1, 0.8 - torch.hypot(u - 0.5, v))


def _arrow(u: Tensor, v: Tensor) -> Tensor:
    # Points up: a head from the tip (0, -1) to v = 0.1, and a shaft below.
    u = u.abs()
    head = torch.maximum((1.1 * u - 0.95 * (v + 1)) / math.hypot(1.1, 0.95), v - 0.1)
    shaft = torch.maximum(torch.maximum(u - 0.34, v - 1), -v)
    return torch.minimum(head, shaft)


SILHOUETTES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "heart": _heart,
    "diamond": _diamond,
    "moon": _moon,
    "arrow": _arrow,
}
