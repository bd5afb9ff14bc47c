"""The two towers as modules that can be traced: one tensor in, named tensors out, as the ecosystem names them.

Axes: C images or captions · L tokens · H × W pixels
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from powerclip.encoders import DualEncoder
from powerclip.encoders.text import text_tower

Precision = Literal["fp32", "fp16", "int8"]
TowerName = Literal["vision_model", "text_model"]

VISION: TowerName = "vision_model"
TEXT: TowerName = "text_model"
# What each tower reads and gives, by transformers' names; the second output only with dense features.
INPUTS: dict[TowerName, str] = {VISION: "pixel_values", TEXT: "input_ids"}
OUTPUTS: dict[TowerName, tuple[str, str]] = {
    VISION: ("image_embeds", "patch_embeds"),
    TEXT: ("text_embeds", "token_embeds"),
}
_ROWS = 2  # of an example: torch.export would take a batch of one for a constant
_LENGTH = 8  # tokens of an example


class Tower(nn.Module):
    """One tower of a dual encoder.

    Global embeddings have length 1. Dense ones, where asked for, are projected and not normalised, as
    `DualEncoder.encode_patches` and `encode_words` give them. Both are float32, whatever the weights are.
    """

    def __init__(self, model: DualEncoder, name: TowerName, dense: bool) -> None:
        super().__init__()
        self.model, self.name, self.dense = model, name, dense

    def forward(self, values: Tensor) -> tuple[Tensor, ...]:
        """The outputs of pixels [C, 3, H, W] or token ids [C, L]."""
        if self.name == VISION:
            values = values.to(self.model.clip.logit_scale.dtype)
            outputs = self.model.encode_patches(values) if self.dense else (self.model.encode_image(values),)
        else:
            outputs = self.model.encode_words(values) if self.dense else (self.model.encode_text(values),)
        if outputs[0].dtype == torch.float32:
            return outputs
        # Half precision rounds the length of a vector to 1 ± 0.0005: it is made 1 again in float32.
        return F.normalize(outputs[0].float(), dim=-1), *(output.float() for output in outputs[1:])


@dataclass(frozen=True)
class TowerToTrace:
    """A tower with what a tracer needs: an example of its input, and which axes may vary."""

    module: Tower
    name: TowerName
    example: Tensor
    dynamic: dict[int, Dim]  # axis → its name and bounds

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return OUTPUTS[self.name] if self.module.dense else OUTPUTS[self.name][:1]


def towers_to_trace(
    model: DualEncoder, *, dense: bool, half: bool = False, free_length: bool = True
) -> list[TowerToTrace]:
    """Both towers of a copy of `model`, in evaluation mode on the CPU; `half` gives float16 weights.

    Without `free_length` captions have the full context length.
    """
    from powerclip.encoders.self_attention import use_packed_attention

    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    # Evaluation runs it too; torch's own attention has a fused path in evaluation mode that exporters do not know.
    use_packed_attention(model)
    model = model.half() if half else model.float()
    vision, text = _only(model, VISION), _only(model, TEXT)
    pixels = torch.zeros(_ROWS, 3, *model.image_size)
    length = min(_LENGTH, model.context_length) if free_length else model.context_length
    tokens = torch.arange(_ROWS * length).reshape(_ROWS, length) % 7  # any ids that every vocabulary has
    text_axes = {0: Dim("batch")} | ({1: Dim("sequence", max=model.context_length)} if free_length else {})
    return [
        TowerToTrace(Tower(vision, VISION, dense).eval(), VISION, pixels, {0: Dim("batch")}),
        TowerToTrace(Tower(text, TEXT, dense).eval(), TEXT, tokens, text_axes),
    ]


def _only(model: DualEncoder, name: TowerName) -> DualEncoder:
    """A copy without the other tower, whose weights torch.export would write beside those that are used."""
    model = copy.deepcopy(model)
    for child in [child for child, _ in model.clip.named_children()]:
        if (child == "visual") != (name == VISION):
            setattr(model.clip, child, nn.Identity())
    if name == VISION:  # open_clip's CLIP carries the text tower's own parameters itself
        for parameter in [parameter for parameter, _ in model.clip.named_parameters(recurse=False)]:
            if parameter != "logit_scale":
                setattr(model.clip, parameter, None)
        return model
    tower = text_tower(model.clip)
    if tower.attn_mask is not None:
        # At the full length the mask would need no slice, which torch.export takes for a case of its own and forbids.
        # One more row and column, which no caption is long enough to read, and every length is a slice.
        tower.attn_mask = F.pad(tower.attn_mask, (0, 1, 0, 1))
    return model


def file_name(name: TowerName, precision: Precision, suffix: str) -> str:
    """`vision_model.onnx`, `vision_model_int8.onnx`: transformers.js finds a precision by this ending."""
    return f"{name}{'' if precision == 'fp32' else f'_{precision}'}{suffix}"


@contextmanager
def tracing() -> Iterator[None]:
    """Without gradients, and without the tracers' notes to their own developers."""
    import logging
    import warnings

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
