"""Exports beside the model: parity, mean recall, size and speed in float32, float16 and int8.

    python benchmarks/export.py runs/quickstart/seed-0/powerclip/model --data captions10k/val-000.tar
    python benchmarks/export.py ViT-B-32 --images 32    # random weights: size and speed count, recall says nothing
    python benchmarks/export.py --tiny                  # tiny towers and embedded scenes: shows that it works

The model in torch (`torch`), the same as torch programs (`pt2`), as transformers' CLIPModel (`hf`) and as ONNX graphs
in onnxruntime (`onnx`). Parity and recall are of all images and captions of --data, or of embedded scenes. A time is
that of the fastest of --repeats calls: whatever else runs on the machine can only add to it. With one thread it is the
process's own time, with several that on the clock. An image at a batch of 1 and of 32, a caption at a batch of 32 that
is as long as its longest. Needs the extra `export`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, markdown, origin, run, write_result
from torch import Tensor

from powerclip.encoders import DualEncoder, build, load, preprocess_for, tokenizer_for, trim
from powerclip.encoders.self_attention import use_packed_attention
from powerclip.export.check import Checker, Exported, read_data, scene_data
from powerclip.export.folder import PRECISIONS, Format, open_export, write_format

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
FORMS: tuple[Format, ...] = ("pt2", "hf", "onnx")
SUFFIXES = (".safetensors", ".onnx", ".data", ".pt2")
BATCH = 32


class InTorch:
    """The model itself, called as an export is."""

    def __init__(self, model: DualEncoder) -> None:
        use_packed_attention(model)
        self.model = model

    def run(self, tower: str, values: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            if tower == "vision_model":
                return {"image_embeds": self.model.encode_image(values)}
            return {"text_embeds": self.model.encode_text(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder, or an open_clip model name")
    parser.add_argument("--data", type=Path, help="images with captions: a .csv or a .tar [default: embedded scenes]")
    parser.add_argument("--images", type=int, default=1000, help="how many of them at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--name", default="export-cpu", help="name of the result files, after the date")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.images, arguments.repeats = 8, 2
        torch.manual_seed(0)
        model: DualEncoder = build(config=TINY).eval()
        preprocess, tokenizer = preprocess_for(model), tokenizer_for(model)
    elif arguments.model:
        model, preprocess, tokenizer = load(arguments.model)
    else:
        parser.error("name a model, or --tiny")
    torch.set_num_threads(arguments.threads)
    limit = arguments.images
    data = scene_data(model, limit) if arguments.data is None else read_data(arguments.data, limit)
    checker = Checker(model, preprocess, tokenizer, data)
    pixels = torch.stack([preprocess(image) for image in data.images[:BATCH]])
    tokens = trim(tokenizer(list(data.captions[:BATCH])))
    size = sum(value.nbytes for value in model.state_dict().values()) / 1e6
    rows = [{"form": "torch", "precision": "fp32", "mb": size, **speed(InTorch(model), pixels, tokens, arguments)}]
    for form in arguments.forms:
        with tempfile.TemporaryDirectory() as folder:
            for precision in PRECISIONS[form]:
                if form == "hf" and precision != "fp32":
                    continue  # the same weights, stored shorter; transformers computes in the dtype it is told
                rows.append(
                    measure_form(model, tokenizer, checker, Path(folder), form, precision, pixels, tokens, arguments)
                )
                print(describe(rows[-1]), flush=True)
    report(rows, model, data.name, arguments)


def measure_form(
    model: DualEncoder,
    tokenizer: Any,
    checker: Checker,
    folder: Path,
    form: Format,
    precision: Any,
    pixels: Tensor,
    tokens: Tensor,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    before = set(folder.rglob("*"))
    start = time.perf_counter()
    write_format(model, tokenizer, folder, form, precision, dense=False)
    seconds = time.perf_counter() - start
    written = sum(path.stat().st_size for path in set(folder.rglob("*")) - before if path.suffix in SUFFIXES)
    exported = open_export(folder, form, precision)
    parity = checker.measure(exported, form, precision, folder)
    return {
        "form": form,
        "precision": precision,
        "mb": written / 1e6,
        "export_seconds": seconds,
        "difference": parity.worst,
        "differences": parity.differences,
        "processor": parity.processor,
        "other_tokens": parity.other_tokens,
        "mean_recall": parity.recall,
        "reference_recall": parity.reference_recall,
        **speed(exported, pixels, tokens, arguments),
    }


def speed(exported: Exported, pixels: Tensor, tokens: Tensor, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds an image or a caption."""
    single, batch = pixels[:1].clone(), pixels
    return {
        "image_ms": milliseconds(lambda: exported.run("vision_model", single), arguments.repeats),
        "image_ms_batch": milliseconds(lambda: exported.run("vision_model", batch), arguments.repeats) / len(batch),
        "caption_ms_batch": milliseconds(lambda: exported.run("text_model", tokens), arguments.repeats) / len(tokens),
    }


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """The time of the fastest call."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    times = []
    for _ in range(repeats):
        start = clock()
        function()
        times.append(clock() - start)
    return 1000 * min(times)


def describe(row: dict[str, Any]) -> str:
    return (
        f"{row['form']} {row['precision']}: difference {row['difference']:.1e}, mean recall "
        f"{100 * row['mean_recall']:.2f} ({100 * row['reference_recall']:.2f}), {row['mb']:.1f} MB, "
        f"{row['image_ms']:.1f} and {row['image_ms_batch']:.1f} ms an image, {row['caption_ms_batch']:.2f} a caption"
    )


def report(rows: list[dict[str, Any]], model: DualEncoder, data: str, arguments: argparse.Namespace) -> None:
    shown = [
        (
            f"{row['form']} {row['precision']}",
            f"{row['difference']:.0e}" if "difference" in row else "–",
            f"{100 * row['mean_recall']:.2f}" if "mean_recall" in row else f"{100 * rows[-1]['reference_recall']:.2f}",
            f"{row['mb']:.1f}",
            f"{row['image_ms']:.1f}",
            f"{row['image_ms_batch']:.1f}",
            f"{row['caption_ms_batch']:.2f}",
        )
        for row in rows
    ]
    heads = [
        "",
        "largest difference",
        "mean recall (%)",
        "MB",
        "ms an image",
        f"… of {BATCH}",
        f"ms a caption of {BATCH}",
    ]
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    about = f"{millions:.1f} million parameters, {data}, {arguments.threads} thread{'s' * (arguments.threads > 1)}"
    text = f"# Exports beside the model\n\n{about}\n\n{markdown(shown, heads)}"
    versions = origin()
    for package in ("onnx", "onnxruntime", "onnxscript", "transformers"):
        import importlib.metadata

        versions[package] = importlib.metadata.version(package)
    path = write_result(arguments.output, arguments.name, versions, {"data": data, "rows": rows}, text)
    print(f"{text}\n\nresult: {path}.json")


if __name__ == "__main__":
    run(main)
