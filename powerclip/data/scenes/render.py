"""Images of scenes, a whole batch at once.

Axes: C scenes · O objects of all scenes · H, W rows and columns of pixels · B rows and columns of a window
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.data.scenes.background import RIM_SHADE, draw_backgrounds
from powerclip.data.scenes.shapes import SILHOUETTES
from powerclip.data.scenes.vocabulary import COLOURS, PATTERNS, SIZES
from powerclip.errors import UserError

if TYPE_CHECKING:
    from powerclip.data.scenes.layout import SceneObject
    from powerclip.data.scenes.scene import Scene

_RIM = 0.12  # width of the dark rim, in radii
_SHAPE_NUMBER = {shape: k for k, shape in enumerate(SILHOUETTES)}


def render(scenes: Sequence[Scene], size: int) -> Tensor:
    """[C, 3, size, size] uint8: the images of these scenes."""
    if size < 16:
        raise UserError(f"scenes cannot be drawn in {size} pixels: use an image size of 16 or more")
    if not scenes:
        return torch.empty(0, 3, size, size, dtype=torch.uint8)
    canvas = draw_backgrounds([scene.background for scene in scenes], size)
    # One layer an object slot: within a layer each scene has one window, so windows never collide.
    for slot in range(max(len(scene.objects) for scene in scenes)):
        rows = [k for k, scene in enumerate(scenes) if len(scene.objects) > slot]
        _paint(canvas, torch.tensor(rows), [scenes[k].objects[slot] for k in rows])
    light = torch.tensor([scene.background.light for scene in scenes])
    return (canvas * (255 * light)[:, None, None, None]).round_().clamp_(0, 255).to(torch.uint8)


def _paint(canvas: Tensor, rows: Tensor, things: Sequence[SceneObject]) -> None:
    """Draw one object on each of these rows of the canvas."""
    size = canvas.shape[-1]
    window = min(size, math.ceil(2 * SIZES["large"][1] * size) + 2)  # holds the largest object and its soft edge
    x = torch.tensor([thing.x for thing in things])
    y = torch.tensor([thing.y for thing in things])
    radius = torch.tensor([thing.radius for thing in things])
    left = ((x * size).round().long() - window // 2).clamp_(0, size - window)  # [O]
    top = ((y * size).round().long() - window // 2).clamp_(0, size - window)
    steps = torch.arange(window)
    columns, lines = left[:, None] + steps, top[:, None] + steps  # [O, B]
    u = (((columns + 0.5) / size - x[:, None]) / radius[:, None])[:, None, :]  # [O, 1, B]
    v = (((lines + 0.5) / size - y[:, None]) / radius[:, None])[:, :, None]  # [O, B, 1]

    edge = torch.empty(len(things), window, window)
    number = torch.tensor([_SHAPE_NUMBER[thing.shape] for thing in things])
    for k, silhouette in enumerate(SILHOUETTES.values()):
        of_shape = (number == k).nonzero()[:, 0]
        if len(of_shape):
            edge[of_shape] = silhouette(u[of_shape], v[of_shape])

    colour = torch.tensor([COLOURS[thing.colour] for thing in things])  # [O, 3]
    second = _second_colour(colour)
    pixel = 1 / (radius * size)[:, None, None]  # a pixel's width in radii
    rim = ((edge + _RIM) / pixel + 0.5).clamp_(0, 1)
    # The pattern stops at the rim: a whole outline keeps the silhouette readable on a small object.
    figure = (_figure(things, u, v, radius) * (1 - rim))[:, None]  # [O, 1, B, B] share of the second colour
    paint = colour[:, :, None, None] + (second - colour)[:, :, None, None] * figure
    shade = (1.04 - 0.09 * (u + v)) * (1 - (1 - RIM_SHADE) * rim)  # lit from the upper left
    cover = (0.5 - edge / pixel).clamp_(0, 1)[:, None]

    at = (rows[:, None, None, None], torch.arange(3)[:, None, None], lines[:, None, :, None], columns[:, None, None, :])
    behind = canvas[at]
    canvas[at] = torch.lerp(behind, paint * shade[:, None], cover)


def _second_colour(colour: Tensor) -> Tensor:
    """The colour of stripes, dots and checks: darker on a light object, lighter on a dark one, of the same hue."""
    light = colour.mean(1, keepdim=True)
    return torch.where(light > 0.5, colour * 0.55, colour + (1 - colour) * 0.62)


def _figure(things: Sequence[SceneObject], u: Tensor, v: Tensor, radius: Tensor) -> Tensor:
    """[O, B, B] in [0, 1]: where the pattern puts the second colour."""
    window = u.shape[-1]
    figure = torch.zeros(len(things), window, window)
    # The same spacing on every object, in widths of the frame: about two stripes on a small one, five on a large.
    scale = (radius / 0.045)[:, None, None]
    number = torch.tensor([PATTERNS.index(thing.pattern) for thing in things])
    for k, draw in enumerate((_stripes, _dots, _checks), start=1):
        of_pattern = (number == k).nonzero()[:, 0]
        if len(of_pattern):
            figure[of_pattern] = draw(u[of_pattern] * scale[of_pattern], v[of_pattern] * scale[of_pattern])
    return figure


def _soft(wave: Tensor) -> Tensor:
    """A wave around 0 as a figure with edges about a pixel soft."""
    return (0.5 + 2 * wave).clamp_(0, 1)


def _stripes(u: Tensor, v: Tensor) -> Tensor:
    return _soft(torch.sin(math.pi / math.sqrt(2) * (u + v)))


def _dots(u: Tensor, v: Tensor) -> Tensor:
    return _soft(torch.cos(math.pi * u) + torch.cos(math.pi * v) - 0.75)


def _checks(u: Tensor, v: Tensor) -> Tensor:
    return _soft(torch.sin(math.pi / 1.3 * u) * torch.sin(math.pi / 1.3 * v) * 2)
