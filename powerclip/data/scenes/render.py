"""Images of scenes, a whole batch at once, on any device.

Axes: C scenes · O objects of all scenes · H, W rows and columns of pixels · B rows and columns of a window
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from powerclip.data.scenes.background import RIM_SHADE, PackedBackgrounds, draw_backgrounds, pack_backgrounds
from powerclip.data.scenes.shapes import SILHOUETTES
from powerclip.data.scenes.vocabulary import COLOURS, PATTERNS, SIZES
from powerclip.errors import UserError

if TYPE_CHECKING:
    from powerclip.data.scenes.scene import Scene

_RIM = 0.12  # width of the dark rim, in radii
_SHAPE_NUMBER = {shape: k for k, shape in enumerate(SILHOUETTES)}
_COLOUR_NUMBER = {colour: k for k, colour in enumerate(COLOURS)}
_PATTERN_NUMBER = {pattern: k for k, pattern in enumerate(PATTERNS)}


class PackedScenes(NamedTuple):
    """Scenes as numbers, all that drawing them needs.

    Objects lie end to end, one shape after the other. A layer has at most one object of each scene. How many objects
    are in each group is known to the host, so that drawing never waits for the device.
    """

    backgrounds: PackedBackgrounds
    place: Tensor  # [O, 3] x, y and radius
    look: Tensor  # [O, 3] long: scene, colour and pattern
    by_layer: Tensor  # [O] the numbers of the objects, one layer after the other
    shapes: tuple[int, ...]  # how many objects there are of each of SILHOUETTES
    layers: tuple[int, ...]  # how many objects each layer has

    def to(self, device: torch.device | str) -> PackedScenes:
        """The same on another device."""
        place, look, by_layer = (part.to(device, non_blocking=True) for part in self[1:4])
        return PackedScenes(self.backgrounds.to(device), place, look, by_layer, self.shapes, self.layers)


def pack_scenes(scenes: Sequence[Scene]) -> PackedScenes:
    """The numbers of scenes; of one or more."""
    things = [(row, thing) for row, scene in enumerate(scenes) for thing in scene.objects]
    looks = [
        (_SHAPE_NUMBER[thing.shape], row, _COLOUR_NUMBER[thing.colour], _PATTERN_NUMBER[thing.pattern])
        for row, thing in things
    ]
    shapes, *rest = np.array(looks, np.int64).reshape(-1, 4).T
    places = np.array([(thing.x, thing.y, thing.radius) for _, thing in things], np.float32).reshape(-1, 3)
    by_shape = np.argsort(shapes, kind="stable")
    look = np.stack(rest, 1)[by_shape]
    # An object's layer: how many of its scene come before it.
    by_scene = np.argsort(look[:, 0], kind="stable")
    counts = np.bincount(look[:, 0], minlength=len(scenes))
    layer = np.empty_like(by_scene)
    layer[by_scene] = np.arange(len(look)) - np.repeat(counts.cumsum() - counts, counts)
    return PackedScenes(
        pack_backgrounds([scene.background for scene in scenes]),
        torch.from_numpy(places[by_shape]),
        torch.from_numpy(look),
        torch.from_numpy(np.argsort(layer, kind="stable")),
        tuple(np.bincount(shapes, minlength=len(SILHOUETTES)).tolist()),
        tuple(np.bincount(layer).tolist()),
    )


def render(scenes: Sequence[Scene], size: int, device: torch.device | str = "cpu") -> Tensor:
    """[C, 3, size, size] uint8: the images of these scenes."""
    if not scenes:
        return torch.empty(0, 3, size, size, dtype=torch.uint8, device=device)
    return render_packed(pack_scenes(scenes).to(device), size)


def render_packed(packed: PackedScenes, size: int, in_layers: bool | None = None) -> Tensor:
    """[C, 3, size, size] uint8: the images of packed scenes, drawn on their device.

    All is float64 until it is rounded to bytes, so that devices, which round sines and roots differently in the last
    digit, draw the same images.

    Args:
        packed: the scenes.
        size: rows and columns of pixels.
        in_layers: whether objects are painted a layer at once, as a GPU wants it, or one by one, as a CPU does.
    """
    if size < 16:
        raise UserError(f"scenes cannot be drawn in {size} pixels: use an image size of 16 or more")
    canvas = draw_backgrounds(packed.backgrounds, size)
    in_layers = canvas.device.type != "cpu" if in_layers is None else in_layers
    if in_layers:
        _paint_in_layers(canvas, packed, _figures(packed, size, packed.shapes))
    else:
        for shape in range(len(packed.shapes)):  # few at a time, which stay in the processor's cache
            _paint_one_by_one(canvas, _figures(packed, size, packed.shapes, shape))
    light = packed.backgrounds.light.double()
    return canvas.mul_((255 * light)[:, None, None, None]).round_().clamp_(0, 255).to(torch.uint8)


class _Figures(NamedTuple):
    """Objects as they are painted on their windows of the canvas."""

    scene: Tensor  # [O]
    top: Tensor  # [O] first row of the window
    left: Tensor  # [O] its first column
    paint: Tensor  # [O, 3, B, B]
    cover: Tensor  # [O, 1, B, B] how much of a pixel the object hides


def _figures(packed: PackedScenes, size: int, shapes: Sequence[int], only: int | None = None) -> _Figures:
    """All objects, or only those of one shape."""
    ends = list(accumulate(shapes))
    first, last = (0, ends[-1]) if only is None else (ends[only] - shapes[only], ends[only])
    place, look = packed.place[first:last].double(), packed.look[first:last]
    device = place.device
    window = min(size, math.ceil(2 * SIZES["large"][1] * size) + 2)  # holds the largest object and its soft edge
    x, y, radius = place.unbind(1)
    scene, colour_number, pattern = look.unbind(1)
    left = ((x * size).round().long() - window // 2).clamp_(0, size - window)  # [O]
    top = ((y * size).round().long() - window // 2).clamp_(0, size - window)
    steps = torch.arange(window, device=device, dtype=place.dtype) + 0.5
    u = (((left[:, None] + steps) / size - x[:, None]) / radius[:, None])[:, None, :]  # [O, 1, B]
    v = (((top[:, None] + steps) / size - y[:, None]) / radius[:, None])[:, :, None]  # [O, B, 1]

    counts = shapes if only is None else [count if k == only else 0 for k, count in enumerate(shapes)]
    parts = zip(SILHOUETTES.values(), u.split(counts), v.split(counts), strict=True)
    edge = torch.cat([silhouette(of_u, of_v) for silhouette, of_u, of_v in parts if len(of_u)] or [u * v])
    colour = _colours(device)[colour_number]  # [O, 3]
    second = _second_colour(colour)
    pixel = 1 / (radius * size)[:, None, None]  # a pixel's width in radii
    rim = ((edge + _RIM) / pixel + 0.5).clamp_(0, 1)
    # The pattern stops at the rim: a whole outline keeps the silhouette readable on a small object.
    figure = (_figure(pattern, u, v, radius) * (1 - rim))[:, None]  # [O, 1, B, B] share of the second colour
    paint = colour[:, :, None, None] + (second - colour)[:, :, None, None] * figure
    shade = (1.04 - 0.09 * (u + v)) * (1 - (1 - RIM_SHADE) * rim)  # lit from the upper left
    cover = (0.5 - edge / pixel).clamp_(0, 1)[:, None]
    return _Figures(scene, top, left, paint * shade[:, None], cover)


@cache
def _colours(device: torch.device) -> Tensor:
    """[colours, 3] on the device; a copy for each batch would wait for it."""
    return torch.tensor([*COLOURS.values()], device=device, dtype=torch.float64)


def _paint_one_by_one(canvas: Tensor, figures: _Figures) -> None:
    window = figures.cover.shape[-1]
    numbers = (figures.scene.tolist(), figures.top.tolist(), figures.left.tolist())
    for scene, top, left, paint, cover in zip(*numbers, figures.paint, figures.cover, strict=True):
        canvas[scene, :, top : top + window, left : left + window].lerp_(paint, cover)


def _paint_in_layers(canvas: Tensor, packed: PackedScenes, figures: _Figures) -> None:
    """Within a layer each scene has one window, so windows never collide."""
    window = torch.arange(figures.cover.shape[-1], device=canvas.device)
    channel = torch.arange(3, device=canvas.device)[:, None, None]
    for numbers in packed.by_layer.split(packed.layers):
        scene, top, left, paint, cover = (part[numbers] for part in figures)
        lines, columns = top[:, None] + window, left[:, None] + window
        at = (scene[:, None, None, None], channel, lines[:, None, :, None], columns[:, None, None, :])
        canvas[at] = torch.lerp(canvas[at], paint, cover)


def _second_colour(colour: Tensor) -> Tensor:
    """The colour of stripes, dots and checks: darker on a light object, lighter on a dark one, of the same hue."""
    light = colour.mean(1, keepdim=True)
    return torch.where(light > 0.5, colour * 0.55, colour + (1 - colour) * 0.62)


def _figure(pattern: Tensor, u: Tensor, v: Tensor, radius: Tensor) -> Tensor:
    """[O, B, B] in [0, 1]: where the pattern puts the second colour."""
    # The same spacing on every object, in widths of the frame: about two stripes on a small one, five on a large.
    scale = (radius / 0.045)[:, None, None]
    u, v, pattern = u * scale, v * scale, pattern[:, None, None]
    # Waves of the two coordinates alone: few sines, though each object has one pattern only.
    stripe, check = math.pi / math.sqrt(2), math.pi / 1.3
    stripes = (stripe * u).sin() * (stripe * v).cos() + (stripe * u).cos() * (stripe * v).sin()
    dots = (math.pi * u).cos() + (math.pi * v).cos() - 0.75
    checks = (check * u).sin() * (check * v).sin() * 2
    wave = torch.where(pattern == 1, stripes, torch.where(pattern == 2, dots, checks))
    # Edges are about a pixel soft.
    return (0.5 + 2 * wave).clamp_(0, 1).where(pattern > 0, 0.0)
