"""Images of scenes, a whole batch at once, on any device.

Axes: C scenes · O objects of all scenes · H, W rows and columns of pixels · B rows and columns of a window
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from powerclip.data.scenes.background import RIM_SHADE, PackedBackgrounds, draw_backgrounds, pack_backgrounds
from powerclip.data.scenes.shapes import SILHOUETTES
from powerclip.data.scenes.vocabulary import COLOURS, PATTERNS, SIZES
from powerclip.errors import UserError

if TYPE_CHECKING:
    from powerclip.data.scenes.layout import SceneObject
    from powerclip.data.scenes.scene import Scene

_RIM = 0.12  # width of the dark rim, in radii
_SHAPE_NUMBER = {shape: k for k, shape in enumerate(SILHOUETTES)}
_COLOUR_NUMBER = {colour: k for k, colour in enumerate(COLOURS)}


class PackedScenes(NamedTuple):
    """Scenes as numbers, all that drawing them needs. Slots that a scene does not fill hold zeros."""

    backgrounds: PackedBackgrounds
    objects: Tensor  # [C] how many each has
    place: Tensor  # [C, slots, 3] x, y and radius
    look: Tensor  # [C, slots, 3] long: shape, colour and pattern

    def to(self, device: torch.device | str) -> PackedScenes:
        """The same on another device."""
        backgrounds = PackedBackgrounds(*(part.to(device, non_blocking=True) for part in self.backgrounds))
        rest = (part.to(device, non_blocking=True) for part in self[1:])
        return PackedScenes(backgrounds, *rest)


def pack_scenes(scenes: Sequence[Scene]) -> PackedScenes:
    """The numbers of scenes; of one or more."""
    slots = max(len(scene.objects) for scene in scenes)
    places = [[(thing.x, thing.y, thing.radius) for thing in scene.objects] for scene in scenes]
    looks = [[_look(thing) for thing in scene.objects] for scene in scenes]
    return PackedScenes(
        pack_backgrounds([scene.background for scene in scenes]),
        torch.tensor([len(scene.objects) for scene in scenes]),
        torch.tensor([place + [(0.0, 0.0, 0.0)] * (slots - len(place)) for place in places]),
        torch.tensor([look + [(0, 0, 0)] * (slots - len(look)) for look in looks]),
    )


def _look(thing: SceneObject) -> tuple[int, int, int]:
    return _SHAPE_NUMBER[thing.shape], _COLOUR_NUMBER[thing.colour], PATTERNS.index(thing.pattern)


def render(scenes: Sequence[Scene], size: int, device: torch.device | str = "cpu") -> Tensor:
    """[C, 3, size, size] uint8: the images of these scenes."""
    if not scenes:
        return torch.empty(0, 3, size, size, dtype=torch.uint8, device=device)
    return render_packed(pack_scenes(scenes).to(device), size)


def render_packed(packed: PackedScenes, size: int) -> Tensor:
    """[C, 3, size, size] uint8: the images of packed scenes, drawn on their device.

    Devices round sines and roots differently in the last digit: a value may then be one level of 255 higher or lower.
    """
    if size < 16:
        raise UserError(f"scenes cannot be drawn in {size} pixels: use an image size of 16 or more")
    canvas = draw_backgrounds(packed.backgrounds, size)
    # One layer an object slot: within a layer each scene has one window, so windows never collide.
    for slot in range(packed.place.shape[1]):
        rows = (packed.objects > slot).nonzero()[:, 0]
        _paint(canvas, rows, packed.place[rows, slot], packed.look[rows, slot])
    light = packed.backgrounds.light
    return (canvas * (255 * light)[:, None, None, None]).round_().clamp_(0, 255).to(torch.uint8)


def _paint(canvas: Tensor, rows: Tensor, place: Tensor, look: Tensor) -> None:
    """Draw one object on each of these rows of the canvas: place and look [O, 3] as in `PackedScenes`."""
    size, device = canvas.shape[-1], canvas.device
    window = min(size, math.ceil(2 * SIZES["large"][1] * size) + 2)  # holds the largest object and its soft edge
    x, y, radius = place.unbind(1)
    shape, colour_number, pattern = look.unbind(1)
    left = ((x * size).round().long() - window // 2).clamp_(0, size - window)  # [O]
    top = ((y * size).round().long() - window // 2).clamp_(0, size - window)
    steps = torch.arange(window, device=device)
    columns, lines = left[:, None] + steps, top[:, None] + steps  # [O, B]
    u = (((columns + 0.5) / size - x[:, None]) / radius[:, None])[:, None, :]  # [O, 1, B]
    v = (((lines + 0.5) / size - y[:, None]) / radius[:, None])[:, :, None]  # [O, B, 1]

    edge = torch.empty(len(rows), window, window, device=device)
    for k, silhouette in enumerate(SILHOUETTES.values()):
        of_shape = (shape == k).nonzero()[:, 0]
        if len(of_shape):
            edge[of_shape] = silhouette(u[of_shape], v[of_shape])

    colour = torch.tensor([*COLOURS.values()], device=device)[colour_number]  # [O, 3]
    second = _second_colour(colour)
    pixel = 1 / (radius * size)[:, None, None]  # a pixel's width in radii
    rim = ((edge + _RIM) / pixel + 0.5).clamp_(0, 1)
    # The pattern stops at the rim: a whole outline keeps the silhouette readable on a small object.
    figure = (_figure(pattern, u, v, radius) * (1 - rim))[:, None]  # [O, 1, B, B] share of the second colour
    paint = colour[:, :, None, None] + (second - colour)[:, :, None, None] * figure
    shade = (1.04 - 0.09 * (u + v)) * (1 - (1 - RIM_SHADE) * rim)  # lit from the upper left
    cover = (0.5 - edge / pixel).clamp_(0, 1)[:, None]

    at = (
        rows[:, None, None, None],
        torch.arange(3, device=device)[:, None, None],
        lines[:, None, :, None],
        columns[:, None, None, :],
    )
    behind = canvas[at]
    canvas[at] = torch.lerp(behind, paint * shade[:, None], cover)


def _second_colour(colour: Tensor) -> Tensor:
    """The colour of stripes, dots and checks: darker on a light object, lighter on a dark one, of the same hue."""
    light = colour.mean(1, keepdim=True)
    return torch.where(light > 0.5, colour * 0.55, colour + (1 - colour) * 0.62)


def _figure(pattern: Tensor, u: Tensor, v: Tensor, radius: Tensor) -> Tensor:
    """[O, B, B] in [0, 1]: where the pattern puts the second colour."""
    window = u.shape[-1]
    figure = torch.zeros(len(pattern), window, window, device=u.device)
    # The same spacing on every object, in widths of the frame: about two stripes on a small one, five on a large.
    scale = (radius / 0.045)[:, None, None]
    for k, draw in enumerate((_stripes, _dots, _checks), start=1):
        of_pattern = (pattern == k).nonzero()[:, 0]
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
