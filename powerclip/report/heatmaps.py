"""Figures of heatmaps: the similarity of each patch to a caption and its phrases, drawn over the image.

Every panel has its own colour scale, from its lowest to its highest patch: cosines of different models and phrases
have different ranges, and the question is *where*, not *how much*.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from powerclip.runtime.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Box = tuple[float, float, float, float]

COLOURS = "turbo"
STRENGTH = 0.55  # of the colours over the image
INK, FAINT = "#1b1f24", "#6b7280"


@dataclass(frozen=True)
class Panel:
    """One heatmap: the phrase above it, its values, and the box that would be right if that is known."""

    phrase: str
    values: Tensor  # [rows, columns]
    box: Box | None = None  # x0, y0, x1, y1 in shares of the image


@dataclass(frozen=True)
class Row:
    """An image and its heatmaps; `name` stands at its left (the model), `caption` above the image."""

    image: Tensor  # [3, H, W] uint8
    panels: Sequence[Panel]
    name: str = ""
    caption: str = ""
    continues: bool = False  # the same phrases as the row before: their titles are not repeated


# Inches, and points for text.
PANEL, GAP, MARGIN, HEADER, FONT = 1.6, 0.09, 0.36, 0.62, 8.5
COLUMNS = 7  # heatmaps beside the image; further ones wrap to another line


def heatmap_figure(rows: Sequence[Row]) -> Figure:
    """One line of panels for each row: the image, then a heatmap for each phrase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [line for row in rows for line in _wrap_row(row)]
    if not lines:
        raise ValueError("a heatmap figure needs at least one row")
    width = MARGIN + (1 + max(len(line.panels) for line in lines)) * (PANEL + GAP)
    height = sum(PANEL + GAP + (0 if line.continues else HEADER) for line in lines)
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    characters = int(PANEL * 72 / (FONT * 0.52))  # that fit above a panel
    top = height
    for line in lines:
        top -= PANEL + GAP + (0 if line.continues else HEADER)
        for column in range(1 + len(line.panels)):
            left = MARGIN + column * (PANEL + GAP)
            axes = figure.add_axes((left / width, (top + GAP) / height, PANEL / width, PANEL / height))
            if column == 0:
                axes.imshow(line.image.permute(1, 2, 0).numpy(), interpolation="lanczos", extent=(0, 1, 1, 0))
                axes.set_ylabel(line.name, fontsize=FONT + 1, fontweight="bold", color=INK, labelpad=5)
                title, colour = line.caption, FAINT
            else:
                panel = line.panels[column - 1]
                _draw(axes, line.image, panel)
                title, colour = panel.phrase, INK
            _hide_frame(axes)
            if not line.continues:
                axes.set_title(_wrap_text(title, characters, 3), fontsize=FONT, color=colour, pad=4)
    return figure


def overlay(image: Tensor, values: Tensor) -> Tensor:
    """A heatmap [rows, columns] in colour over the greyed image [3, H, W] uint8: [H, W, 3] float in 0…1."""
    from matplotlib import colormaps

    height, width = image.shape[1:]
    extent = (values.max() - values.min()).clamp(min=1e-12)
    scaled = ((values - values.min()) / extent).float()[None, None]
    heat = interpolate(scaled, size=(height, width), mode="bilinear", align_corners=False)[0, 0].nan_to_num()
    colours = torch.as_tensor(colormaps[COLOURS](heat.cpu().numpy())[..., :3]).float()
    weights = torch.tensor([0.299, 0.587, 0.114])
    # Grey, so that the colours of the image are not mistaken for those of the heatmap.
    grey = (image.float().cpu() / 255 * weights[:, None, None]).sum(0)[..., None]
    return STRENGTH * colours + (1 - STRENGTH) * grey


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG in memory."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure as a whole or not at all; missing folders are made."""
    write_atomic(path, png_bytes(figure))


def _draw(axes: Any, image: Tensor, panel: Panel) -> None:
    from matplotlib.patches import Rectangle

    # The image may be much coarser than the figure: enlarge first, so that the heatmap stays smooth.
    factor = max(1, 256 // min(image.shape[1:]))
    large = interpolate(image[None].float(), scale_factor=factor, mode="bilinear", align_corners=False)[0]
    axes.imshow(overlay(large, panel.values).clamp(0, 1).numpy(), extent=(0, 1, 1, 0), interpolation="bilinear")
    if panel.box is not None:
        x0, y0, x1, y1 = panel.box
        for colour, thickness in ((INK, 2.4), ("white", 1.2)):
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, lw=thickness))
    rows, columns = panel.values.shape
    highest = int(panel.values.flatten().argmax())
    x, y = (highest % columns + 0.5) / columns, (highest // columns + 0.5) / rows
    axes.plot(x, y, marker="+", color=INK, markersize=8, markeredgewidth=2.4)
    axes.plot(x, y, marker="+", color="white", markersize=7, markeredgewidth=1.2)


def _hide_frame(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.set_ylim(1, 0)
    for side in axes.spines.values():
        side.set_visible(False)


def _wrap_text(text: str, width: int, lines: int) -> str:
    """Break a phrase into at most so many lines. `$` is escaped: matplotlib would read mathematics."""
    text = " ".join(text.split()).replace("$", r"\$")
    return "\n".join(textwrap.wrap(text, width=max(width, 8), max_lines=lines, placeholder=" …"))


def _wrap_row(row: Row) -> list[Row]:
    """The row as lines of at most `COLUMNS` panels; the image stands before each."""
    lines = []
    for start in range(0, max(len(row.panels), 1), COLUMNS):
        line = replace(row, panels=row.panels[start : start + COLUMNS])
        lines.append(line if start == 0 else replace(line, caption=""))
    return lines
