"""Towers as programs of torch.export: `vision_model.pt2` and `text_model.pt2`, which run with torch alone."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from powerclip.encoders import DualEncoder
from powerclip.encoders.text import reads_ahead
from powerclip.errors import UserError
from powerclip.export.towers import OUTPUTS, TEXT, VISION, Precision, TowerName, file_name, towers_to_trace, tracing


def write_pt2(model: DualEncoder, folder: Path, *, dense: bool, precision: Precision = "fp32") -> None:
    """Write both towers of `model` into `folder`.

    Raises:
        UserError: a precision that torch.export does not give.
    """
    if precision == "int8":
        raise UserError("--to pt2 has no int8: choose --precision fp32 or fp16, or --to onnx")
    # A tower that reads ahead pads its captions and cuts its words again, which torch.export only does for lengths
    # below the full one.
    free_length = not reads_ahead(model.clip)
    for tower in towers_to_trace(model, dense=dense, half=precision == "fp16", free_length=free_length):
        with tracing():
            program = torch.export.export(tower.module, (tower.example,), dynamic_shapes=(tower.dynamic,))
        # By way of memory: torch's own writer meets a full disk with a RuntimeError that does not say so.
        content = io.BytesIO()
        torch.export.save(program, content)
        (folder / file_name(tower.name, precision, ".pt2")).write_bytes(content.getbuffer())


class Pt2Model:
    """Exported programs that run in torch."""

    def __init__(self, folder: Path, precision: Precision = "fp32") -> None:
        self._towers = {
            name: torch.export.load(folder / file_name(name, precision, ".pt2")).module() for name in (VISION, TEXT)
        }

    def run(self, tower: TowerName, values: Tensor) -> dict[str, Tensor]:
        """The named outputs of one tower."""
        with torch.inference_mode():
            outputs = self._towers[tower](values)
        return dict(zip(OUTPUTS[tower], outputs, strict=False))
