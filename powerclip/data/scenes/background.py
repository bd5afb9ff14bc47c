"""What lies behind the objects of a scene: a plain tint, a gradient, soft blobs or a woven texture.

Axes: C scenes · H, W rows and columns of pixels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from powerclip.data.scenes.vocabulary import COLOURS

if TYPE_CHECKING:
    from powerclip.data.scenes.layout import SceneObject

KINDS = ("plain", "gradient", "blobs", "woven")
_KIND_NUMBER = {kind: k for k, kind in enumerate(KINDS)}
_BLOBS = 6  # blobs across the frame
# Least distance in RGB between the background and an object's colour, and between it and the object's shaded rim.
_CONTRAST, _RIM_CONTRAST = 0.42, 0.36
RIM_SHADE = 0.62  # the rim is this much of the object's brightness
_RIMS = {colour: (RIM_SHADE * r, RIM_SHADE * g, RIM_SHADE * b) for colour, (r, g, b) in COLOURS.items()}

Colour = tuple[float, float, float]


class Background(NamedTuple):
    """A background: two nearby tints and how they mix. `phase` is a number in [0, 1) that makes it one of a kind."""

    kind: str
    near: Colour
    far: Colour
    angle: float
    phase: float
    light: float  # brightness of the whole image


def draw_background(objects: Sequence[SceneObject], rng: Random) -> Background:
    """A background from which the colours of these objects stand out."""
    named = {thing.colour for thing in objects}
    colours = [(COLOURS[colour], _CONTRAST) for colour in named] + [(_RIMS[colour], _RIM_CONTRAST) for colour in named]
    near, contrast = (0.5, 0.5, 0.5), 0.0
    for _ in range(20):
        grey = 0.22 + 0.66 * rng.random()
        tint = (grey + _tint(rng), grey + _tint(rng), grey + _tint(rng))
        least = min([math.dist(tint, colour) / distance for colour, distance in colours])
        if least > contrast:
            near, contrast = tint, least
        if contrast > 1:
            break
    shift = 0.09 if rng.random() < 0.5 else -0.09
    far = (near[0] + shift, near[1] + shift, near[2] + shift)
    kind, angle, phase = rng.choice(KINDS), 2 * math.pi * rng.random(), rng.random()
    return Background(kind, near, far, angle, phase, light=0.92 + 0.12 * rng.random())


def _tint(rng: Random) -> float:
    return 0.18 * (rng.random() - 0.5)


class PackedBackgrounds(NamedTuple):
    """Backgrounds as numbers, for `draw_backgrounds` on any device."""

    numbers: Tensor  # [C, 9] near, far, angle, phase and light
    by_kind: Tensor  # [C] the numbers of the backgrounds, one kind after the other
    kinds: tuple[int, ...]  # how many there are of each of KINDS, known to the host

    def to(self, device: torch.device | str) -> PackedBackgrounds:
        """The same on another device."""
        return self._replace(
            numbers=self.numbers.to(device, non_blocking=True), by_kind=self.by_kind.to(device, non_blocking=True)
        )

    @property
    def light(self) -> Tensor:
        """Brightness of each image [C]."""
        return self.numbers[:, 8]


def pack_backgrounds(backgrounds: Sequence[Background]) -> PackedBackgrounds:
    """The numbers of backgrounds."""
    numbers = np.array([(*b.near, *b.far, b.angle, b.phase, b.light) for b in backgrounds], np.float32)
    kinds = np.array([_KIND_NUMBER[b.kind] for b in backgrounds])
    return PackedBackgrounds(
        torch.from_numpy(numbers),
        torch.from_numpy(np.argsort(kinds, kind="stable")),
        tuple(np.bincount(kinds, minlength=len(KINDS)).tolist()),
    )


def draw_backgrounds(packed: PackedBackgrounds, size: int) -> Tensor:
    """[C, 3, H, W] float64 in about [0, 1], before lighting, on the device of the numbers."""
    numbers = packed.numbers.double()
    near, far, angle, phase = numbers[:, :3], numbers[:, 3:6], numbers[:, 6], numbers[:, 7]
    across = ((torch.arange(size, device=numbers.device, dtype=numbers.dtype) + 0.5) / size - 0.5).expand(size, size)
    down = across.T  # both [H, W]: x and y
    mix = _noise(phase, size).sub_(0.5).mul_(0.35)
    for kind, rows in zip(KINDS, packed.by_kind.split(packed.kinds), strict=True):
        if kind != "plain" and len(rows):
            mix[rows] += _MIXES[kind](angle[rows], phase[rows], across, down)
    return ((far - near)[:, :, None, None] * mix[:, None]).add_(near[:, :, None, None])


def _along(angle: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """[C, H, W] the coordinate along a direction, in [-0.71, 0.71]."""
    return angle.cos()[:, None, None] * across + angle.sin()[:, None, None] * down


def _gradient(angle: Tensor, phase: Tensor, across: Tensor, down: Tensor) -> Tensor:
    return 0.5 + 1.4 * _along(angle, across, down)


def _blobs(angle: Tensor, phase: Tensor, across: Tensor, down: Tensor) -> Tensor:
    coarse = _noise(phase, _BLOBS)[:, None]
    fine = torch.nn.functional.interpolate(coarse, size=across.shape, mode="bilinear", align_corners=True)
    return 1.6 * fine[:, 0]


def _woven(angle: Tensor, phase: Tensor, across: Tensor, down: Tensor) -> Tensor:
    turns = 2 * math.pi * (4 + 3 * phase)[:, None, None]
    one = torch.sin(turns * _along(angle, across, down))
    other = torch.sin(turns * _along(angle + math.pi / 2, across, down))
    return 0.5 + 0.5 * one * other


_MIXES = {"gradient": _gradient, "blobs": _blobs, "woven": _woven}


def _noise(phase: Tensor, size: int) -> Tensor:
    """[C, H, W] in [0, 1): a hash of scene and pixel, in whole numbers so that every machine draws the same."""
    row = torch.arange(size, device=phase.device)
    start = (phase.double() * 2**30).long()
    # Kept to 32 bits: the products then stay below 2^63.
    value = ((row * 374761393)[:, None] + (row * 668265263) + start[:, None, None]).bitwise_and_(0xFFFFFFFF)
    value = value.bitwise_xor_(value >> 13).mul_(1274126177).bitwise_and_(0xFFFFFFFF)
    return value.bitwise_xor_(value >> 16).bitwise_and_(0xFFFF).to(phase.dtype).div_(0x10000)
