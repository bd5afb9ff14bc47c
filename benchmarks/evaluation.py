"""Our evaluation beside clip-benchmark's own evaluators: the same model, images and texts; numbers and seconds.

    python benchmarks/evaluation.py runs/my-run/model --data $POWERCLIP_DATA
    python benchmarks/evaluation.py --tiny             # random towers on images made in a moment: shows that it works

Flickr8k's test images (retrieval), SugarCrepe kind by kind, and the ImageNet sample (zero-shot, as many of the 80
templates as --templates says). Neither keeps embeddings. clip-benchmark reads by a DataLoader with its own default of 4
workers (0 with --tiny), batches of 64 and texts padded to the context length; ours as `powerclip evaluate` does. Needs
the extra `eval`.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, markdown, origin, run, write_result
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, build, load, preprocess_for, tokenizer_for
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import CaptionRetrieval, Classification, HardNegatives, Task

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
BATCH = 64


class Items(Dataset):
    """What clip-benchmark's evaluators read: an image, or a stack of one, and the answer."""

    def __init__(self, encoder: DualEncoder, task: Task, indices: list[int], answers: list[Any], stacked: bool = False):
        self.prepare, self.images, self.indices = preprocess_for(encoder), task.images, indices
        self.answers, self.stacked = answers, stacked
        self.classes = getattr(task, "classes", None)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, Any]:
        pixels = self.prepare(self.images.decode(self.images.read(self.indices[item])))
        return (pixels[None] if self.stacked else pixels), self.answers[item]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder, or an open_clip model name")
    parser.add_argument("--data", type=Path, help="the folder that holds captions10k/, sugarcrepe/, imagenet-sample/")
    parser.add_argument("--templates", type=int, default=80, help="how many of ImageNet's templates to use")
    parser.add_argument("--workers", type=int, default=4, help="workers of clip-benchmark's loader")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--name", help="name of the result files, after the date [default: evaluation-DEVICE]")
    arguments = parser.parse_args()
    if not arguments.tiny and not (arguments.model and arguments.data):
        parser.error("name a model and --data, or --tiny")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tiny:
            arguments.workers, arguments.templates = 0, 2
            torch.manual_seed(0)
            encoder = build(config=TINY).eval()
            tokenizer, data = tokenizer_for(encoder), tiny_data(Path(folder))
        else:
            encoder, _, tokenizer = load(arguments.model, device=arguments.device)
            encoder, data = encoder.eval(), arguments.data
        embedder = Embedder(encoder, CaptionTokenizer(tokenizer))
        rows = []
        for name, task in tasks(data, arguments.templates).items():
            ours, seconds = timed(lambda task=task: task.score(embedder).parts)
            theirs, reference_seconds = timed(lambda task=task: by_clip_benchmark(encoder, tokenizer, task, arguments))
            difference = largest_difference(ours, theirs)
            rows.append({"dataset": name, "ours": ours, "clip_benchmark": theirs, "largest_difference": difference})
            rows[-1] |= {"seconds": seconds, "clip_benchmark_seconds": reference_seconds}
            print(
                f"{name}: largest difference {difference:.1e}; {seconds:.1f} s, "
                f"clip-benchmark {reference_seconds:.1f} s",
                flush=True,
            )
    report(rows, arguments)


def tasks(data: Path, templates: int) -> dict[str, Task]:
    sample = read_path(data / "imagenet-sample" / "imagenet-sample.tar")
    assert isinstance(sample, Classification)
    return {
        "flickr8k test": read_path(data / "captions10k" / "test-000.tar"),
        "sugarcrepe": read_path(data / "sugarcrepe"),
        "imagenet sample": Classification(
            sample.images, sample.labels, sample.classes, list(sample.templates)[:templates]
        ),
    }


def by_clip_benchmark(
    encoder: DualEncoder, tokenizer: Any, task: Task, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Part → metrics, by its evaluators and open_clip's own model."""
    from clip_benchmark.datasets.builder import image_captions_collate_fn
    from clip_benchmark.metrics import image_caption_selection, zeroshot_classification, zeroshot_retrieval

    model, device = encoder.clip, next(encoder.parameters()).device.type

    def loader(items: Items, texts: bool = True) -> DataLoader:
        collate = image_captions_collate_fn if texts else None
        return DataLoader(items, batch_size=BATCH, collate_fn=collate, num_workers=arguments.workers)

    if isinstance(task, CaptionRetrieval):
        answers: list[list[str]] = [[] for _ in task.images.names]
        for caption, owner in zip(task.captions, task.image_of_caption.tolist(), strict=True):
            answers[owner].append(caption)
        items = loader(Items(encoder, task, list(range(len(answers))), answers))
        return {"": zeroshot_retrieval.evaluate(model, items, tokenizer, device, amp=False, recall_k_list=[1, 5, 10])}
    if isinstance(task, HardNegatives):
        parts = {}
        for kind in dict.fromkeys(task.kinds):
            numbers = [number for number, name in enumerate(task.kinds) if name == kind]
            texts = [[task.captions[number], task.negatives[number]] for number in numbers]
            images = [int(task.image_of_item[number]) for number in numbers]
            items = loader(Items(encoder, task, images, texts, stacked=True))
            parts[kind] = image_caption_selection.evaluate(model, items, tokenizer, device, amp=False)
        return parts
    assert isinstance(task, Classification)
    zeroshot_classification.accuracy = top_shares
    items = loader(Items(encoder, task, list(range(len(task.labels))), task.labels.tolist()), texts=False)
    classes, templates = list(task.classes), list(task.templates)
    return {"": zeroshot_classification.evaluate(model, items, tokenizer, classes, templates, device, amp=False)}


def top_shares(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """clip-benchmark's `accuracy`, without the conversion that fails with the newest NumPy."""
    hits = output.topk(max(topk), 1, True, True)[1].eq(target[:, None])
    return [hits[:, :k].any(1).double().mean().item() for k in topk]


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def largest_difference(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> float:
    assert theirs.keys() <= ours.keys()  # ours has the whole of SugarCrepe beside its kinds
    pairs = [(ours[part][name], value) for part in theirs for name, value in theirs[part].items()]
    return max(abs(float(one) - float(other)) for one, other in pairs)


def report(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    cells = []
    for row in rows:
        for part, metrics in row["ours"].items():
            shown = ", ".join(f"{name} {100 * value:.1f}" for name, value in metrics.items() if value is not None)
            cells.append([f"{row['dataset']} {part}".strip(), shown, "", "", ""])
        cells[-len(row["ours"])][2:] = [
            f"{row['largest_difference']:.1e}",
            f"{row['seconds']:.1f}",
            f"{row['clip_benchmark_seconds']:.1f}",
        ]
    heads = ["dataset", "%", "largest difference to clip-benchmark (share)", "s", "clip-benchmark, s"]
    text = f"# Evaluation beside clip-benchmark's\n\n{arguments.model or 'random towers'}\n\n{markdown(cells, heads)}"
    name = arguments.name or f"evaluation-{'tiny' if arguments.tiny else arguments.device.split(':')[0]}"
    data = {"model": arguments.model, "templates": arguments.templates, "workers": arguments.workers, "rows": rows}
    path = write_result(arguments.output, name, origin(), data, text)
    print(f"\n{text}\n\n{path}.json, .md")


def tiny_data(folder: Path) -> Path:
    """The three datasets in their layouts, from coarse noise."""
    from powerclip.evaluate.imagenet import class_numbers

    def image(seed: int) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (4, 4, 3), dtype=torch.uint8, generator=generator).numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((40, 36)).save(buffer, "PNG")
        return buffer.getvalue()

    def shard(path: Path, members: dict[str, bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

    captions = {f"{n}.json": json.dumps({"captions": [f"number {n}", f"view {n}"]}).encode() for n in range(20)}
    shard(folder / "captions10k" / "test-000.tar", {**{f"{n}.png": image(n) for n in range(20)}, **captions})
    numbers = class_numbers("tiny")[:20]
    labels = {f"{number}.cls": str(label).encode() for label, number in enumerate(numbers)}
    images = {f"{number}.png": image(label) for label, number in enumerate(numbers)}
    shard(folder / "imagenet-sample" / "imagenet-sample.tar", {**images, **labels})
    (folder / "sugarcrepe" / "images").mkdir(parents=True)
    items = {}
    for number in range(20):
        (folder / "sugarcrepe" / "images" / f"{number}.png").write_bytes(image(number))
        texts = {"caption": f"a cup and {number}", "negative_caption": f"a dog and {number}"}
        items[str(number)] = {"filename": f"{number}.png", **texts}
    (folder / "sugarcrepe" / "replace_obj.json").write_text(json.dumps(items))
    return folder


if __name__ == "__main__":
    run(main)
