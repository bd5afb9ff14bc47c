"""A model as the folder of a `transformers.CLIPModel`: config, weights, tokenizer and image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from powerclip.encoders import DualEncoder
from powerclip.encoders.hugging_face import CONFIG_FILE, WEIGHT_FILES, to_clip_model
from powerclip.encoders.transforms import Tokenizer
from powerclip.errors import UserError
from powerclip.export.processor import require_transformers, transformers_only_errors, write_processor
from powerclip.export.towers import VISION, Precision, TowerName

WEIGHTS_FILE = WEIGHT_FILES[0]


def write_hugging_face(
    model: DualEncoder, tokenizer: Tokenizer, folder: Path, *, precision: Precision = "fp32"
) -> None:
    """Write `model` into `folder` as a CLIPModel.

    Raises:
        UserError: a CLIPModel has no place for some part of the model; the message says for which.
    """
    if precision == "int8":
        raise UserError("--to hf has no int8: choose --precision fp32 or fp16, or --to onnx")
    require_transformers()
    written = to_clip_model(model)
    dtype = torch.float16 if precision == "fp16" else torch.float32
    weights = {
        name: (value.to(dtype) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in written.state.items()
    }
    write_processor(model, tokenizer, folder)
    content = written.config | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    # transformers asks for the framework that a file was made with.
    (folder / WEIGHTS_FILE).write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))


class HuggingFaceModel:
    """A written folder, run by `transformers.CLIPModel`; dense features by the projections that it has."""

    def __init__(self, folder: Path) -> None:
        from transformers import CLIPModel

        with transformers_only_errors():
            model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()

    def run(self, tower: TowerName, values: Tensor) -> dict[str, Tensor]:
        """The named outputs of one tower."""
        model = self._model
        with torch.inference_mode():
            if tower == VISION:
                outputs = model.vision_model(pixel_values=values)
                # CLIPModel normalises its pooled token alone; the patches take the same norm here.
                patches = model.vision_model.post_layernorm(outputs.last_hidden_state[:, 1:])
                pooled = model.visual_projection(outputs.pooler_output)
                return {"image_embeds": _unit(pooled), "patch_embeds": model.visual_projection(patches)}
            outputs = model.text_model(input_ids=values)
            words = model.text_projection(outputs.last_hidden_state)
            return {"text_embeds": _unit(model.text_projection(outputs.pooler_output)), "token_embeds": words}


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)
