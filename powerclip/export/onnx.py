"""Towers as ONNX graphs, in the layout that transformers.js reads: `onnx/vision_model.onnx`, `onnx/text_model.onnx`.

The precision is part of a file's name (`vision_model_fp16.onnx`, `…_int8.onnx`); several may lie in a folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerclip.encoders import DualEncoder
from powerclip.encoders.hugging_face import CONFIG_FILE
from powerclip.errors import UserError
from powerclip.export.towers import (
    INPUTS,
    OUTPUTS,
    TEXT,
    VISION,
    Precision,
    TowerName,
    TowerToTrace,
    file_name,
    towers_to_trace,
    tracing,
)

FOLDER = "onnx"
# A protobuf holds at most 2 GiB: the weights of a larger tower go into a file of their own beside the graph.
LARGEST_GRAPH = 1.8e9
# What dynamic quantization turns into integers: matrix products and embeddings. The patches' convolution is one product
# of many, and its integer form is slow or missing in some runtimes.
QUANTIZED = ["MatMul", "Gemm", "Gather"]


def write_onnx(model: DualEncoder, folder: Path, *, dense: bool, precision: Precision = "fp32") -> None:
    """Write both towers of `model` into `folder`/onnx.

    Raises:
        UserError: a package of the extra `export` is missing.
    """
    require_onnx()
    (folder / CONFIG_FILE).write_text(json.dumps(_config(model), indent=2) + "\n", encoding="utf-8")
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    for tower in towers_to_trace(model, dense=dense, half=precision == "fp16"):
        path = target / file_name(tower.name, precision, ".onnx")
        if precision == "int8":
            _write_quantized(tower, path)
        else:
            _write_graph(tower, path)


def _config(model: DualEncoder) -> dict[str, Any]:
    """What transformers.js reads before it opens the graphs: that they are a CLIP's two towers, and their sizes."""
    height, width = model.image_size
    return {
        "model_type": "clip",
        "projection_dim": model.embed_dim,
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": height if height == width else [height, width],
            "projection_dim": model.embed_dim,
        },
        "text_config": {
            "model_type": "clip_text_model",
            "max_position_embeddings": model.context_length,
            "projection_dim": model.embed_dim,
        },
    }


def require_onnx() -> None:
    """UserError when a package is missing that ONNX needs."""
    import importlib.util

    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX needs {', '.join(missing)}: pip install 'powerclip[export]'")


def _write_graph(tower: TowerToTrace, path: Path) -> None:
    # The exporter prints its steps, and that it could not convert the graph to an older opset, to standard output.
    with tracing(), contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(
            tower.module,
            (tower.example,),
            dynamo=True,
            dynamic_shapes=(tower.dynamic,),
            input_names=[INPUTS[tower.name]],
            output_names=list(tower.outputs),
            verbose=False,
        )
    assert program is not None  # with dynamo=True and no file it returns the program
    size = sum(value.nbytes for value in tower.module.state_dict().values())
    program.save(path, external_data=size > LARGEST_GRAPH)


def _write_quantized(tower: TowerToTrace, path: Path) -> None:
    """Weights as int8, activations quantized while the graph runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    written = path.with_name(file_name(tower.name, "fp32", ".onnx"))
    whole = written if written.exists() else path.with_name(f"{tower.name}.whole.onnx")
    if whole != written:
        _write_graph(tower, whole)
    large = whole.with_name(f"{whole.name}.data").exists()
    try:
        with _only_errors(logging.getLogger()):  # it advises a preparation that the exporter has done already
            quantize_dynamic(
                whole,
                path,
                op_types_to_quantize=QUANTIZED,
                weight_type=QuantType.QInt8,
                use_external_data_format=large,
            )
    finally:
        if whole != written:
            for leftover in path.parent.glob(f"{whole.name}*"):
                leftover.unlink()


@contextlib.contextmanager
def _only_errors(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class OnnxModel:
    """Exported graphs, run by onnxruntime on the CPU with `threads` threads."""

    def __init__(self, folder: Path, precision: Precision = "fp32", threads: int = 0) -> None:
        require_onnx()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        self._sessions = {
            name: onnxruntime.InferenceSession(
                folder / FOLDER / file_name(name, precision, ".onnx"), options, providers=["CPUExecutionProvider"]
            )
            for name in (VISION, TEXT)
        }

    def run(self, tower: TowerName, values: Tensor) -> dict[str, Tensor]:
        """The named outputs of one tower."""
        session = self._sessions[tower]
        names = [output.name for output in session.get_outputs()]
        assert names == list(OUTPUTS[tower][: len(names)])
        outputs = session.run(names, {INPUTS[tower]: values.contiguous().numpy()})
        return {name: torch.from_numpy(output) for name, output in zip(names, outputs, strict=True)}
