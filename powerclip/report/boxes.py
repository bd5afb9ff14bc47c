"""A figure of an image with boxes, each with its name and how sure a detector is of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from powerclip.report.heatmaps import Box

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by people who cannot tell red from green too (Okabe & Ito).
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d00", "#5f4b8b")
_WIDTH = 7.0  # inches
_FONT = 9.0  # points


@dataclass(frozen=True)
class NamedBox:
    """A box in shares of the image, what it is, and how sure that is, 0 to 1."""

    box: Box  # left, top, right, bottom
    name: str
    score: float


def boxes_figure(image: Tensor, boxes: Sequence[NamedBox]) -> Figure:
    """The image [3, H, W] uint8 with boxes; each name has a colour, and the surest boxes lie on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    height, width = image.shape[1:]
    figure = Figure(figsize=(_WIDTH, _WIDTH * height / width), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(image.permute(1, 2, 0).numpy(), extent=(0, 1, 1, 0), aspect="auto", interpolation="lanczos")
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(1, 0)
    names = list(dict.fromkeys(one.name for one in boxes))
    for one in sorted(boxes, key=lambda one: one.score):
        left, top, right, bottom = one.box
        colour = COLOURS[names.index(one.name) % len(COLOURS)]
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, lw=2))
        high = top < 0.05  # no room above: inside then
        far = left > 0.75  # nor at the right
        axes.text(
            right if far else left,
            top,
            f" {one.name} {one.score:.2f} ".replace("$", r"\$"),
            fontsize=_FONT,
            color="white",
            ha="right" if far else "left",
            va="top" if high else "bottom",
            clip_on=True,
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0},
        )
    return figure
