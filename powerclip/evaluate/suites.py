"""The paper's benchmarks by name: which there are, where to get each, and how its folder becomes a task.

Definitions, class names and templates are clip-benchmark's, from its webdataset layout or from the original folders.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from powerclip.errors import UserError, nearest
from powerclip.evaluate.images import DatasetImages
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import CaptionRetrieval, Classification, LinearProbe, Task

EXTRA = "install the definitions of the benchmarks first: pip install 'powerclip[eval]'"
_HUB = "https://huggingface.co/datasets/clip-benchmark"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark of the paper."""

    name: str  # as clip-benchmark calls it
    label: str  # as the paper's tables call it
    suite: str
    webdataset: str = ""  # its name on clip-benchmark's hub, without `wds_`
    source: str = ""  # where to get the original, if the hub does not have it
    needs: str = ""  # what an original folder must hold besides; clip-benchmark would download it unasked
    probe: bool = False  # linear probe instead of zero-shot

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders below the data root where it is looked for, the recommended one first."""
        original = self.name.rpartition("/")[2]
        return tuple(dict.fromkeys([*([f"wds_{self.webdataset}"] if self.webdataset else []), original]))

    @property
    def origin(self) -> str:
        """Where to get it."""
        return self.source or f"{_HUB}/wds_{self.webdataset}"

    @property
    def key(self) -> str:
        """A unique name: a dataset may have both a zero-shot benchmark and a linear probe."""
        return f"{self.name}:probe" if self.probe else self.name


def _zero_shot(name: str, label: str, webdataset: str = "") -> Benchmark:
    return Benchmark(name, label, "classification", webdataset or name)


BENCHMARKS = (
    _zero_shot("food101", "Food101"),
    _zero_shot("cifar10", "CIFAR10", "vtab-cifar10"),
    _zero_shot("cifar100", "CIFAR100", "vtab-cifar100"),
    _zero_shot("sun397", "SUN397"),
    _zero_shot("cars", "Cars"),
    _zero_shot("voc2007", "VOC07"),  # one object a crop: top-1, as the others
    _zero_shot("fgvc_aircraft", "Aircraft"),
    _zero_shot("dtd", "DTD", "vtab-dtd"),
    _zero_shot("pets", "OxfordPets", "vtab-pets"),
    _zero_shot("caltech101", "Caltech101", "vtab-caltech101"),
    _zero_shot("flowers", "Flowers", "vtab-flowers"),
    _zero_shot("stl10", "STL10"),
    _zero_shot("eurosat", "EuroSAT", "vtab-eurosat"),
    _zero_shot("resisc45", "RESISC45", "vtab-resisc45"),
    _zero_shot("gtsrb", "GTSRB"),
    _zero_shot("country211", "Country"),
    _zero_shot("pcam", "PCam", "vtab-pcam"),
    Benchmark("mscoco_captions", "MS-COCO", "retrieval", "mscoco_captions", needs="coco_test_karpathy.json"),
    Benchmark("flickr8k", "Flickr8K", "retrieval", "flickr8k", needs="flickr8k_test_karpathy.txt"),
    Benchmark("flickr30k", "Flickr30K", "retrieval", "flickr30k", needs="flickr30k_test_karpathy.txt"),
    Benchmark("imagenet1k", "ImgNet-1k", "robustness", "imagenet1k"),
    Benchmark("imagenetv2", "ImgNet-V2", "robustness", "imagenetv2", needs="ImageNetV2-matched-frequency"),
    Benchmark("imagenet-a", "ImgNet-A", "robustness", "imagenet-a"),
    Benchmark("imagenet-r", "ImgNet-R", "robustness", "imagenet-r"),
    Benchmark("imagenet-o", "ImgNet-O", "robustness", "imagenet-o"),
    Benchmark("imagenet_sketch", "ImgNet-S", "robustness", "imagenet_sketch"),
    Benchmark(
        "sugar_crepe",
        "SugarCrepe",
        "composition",
        source="https://github.com/RAIVNLab/sugar-crepe (data/*.json) and COCO's val2017 images",
    ),
    Benchmark("winoground", "Winoground", "composition", source="https://huggingface.co/datasets/facebook/winoground"),
    # VOC07 with all objects of whole images, by mean average precision: another number, in no table of the paper.
    Benchmark("voc2007_multilabel", "VOC07 (several labels)", "multilabel", "voc2007_multilabel"),
    Benchmark("cifar10", "CF10", "probe", "vtab-cifar10", probe=True),
    Benchmark("cifar100", "CF100", "probe", "vtab-cifar100", probe=True),
    Benchmark("imagenet1k", "IN1k", "probe", "imagenet1k", probe=True),
)
SUITES = ("paper", "classification", "retrieval", "robustness", "composition", "probe", "multilabel")
BEYOND = ("multilabel",)  # what the paper does not report


class MissingError(UserError):
    """A benchmark is not below the data root. The message says where to get it and where it belongs."""


def choose(suite: str, only: Sequence[str] = ()) -> list[Benchmark]:
    """The benchmarks of a suite, or those of them that are named.

    Raises:
        UserError: there is no such suite, or no such benchmark in it.
    """
    if suite not in SUITES:
        raise UserError(f"there is no suite {suite!r}{nearest(suite, list(SUITES))}; known: {', '.join(SUITES)}")
    members = [
        benchmark
        for benchmark in BENCHMARKS
        if suite == benchmark.suite or (suite == "paper" and benchmark.suite not in BEYOND)
    ]
    known = list(dict.fromkeys(benchmark.key for benchmark in members))
    for name in only:
        if name not in known:
            raise UserError(f"suite {suite!r} has no dataset {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return [benchmark for benchmark in members if not only or benchmark.key in only]


def find_benchmark(benchmark: Benchmark, root: Path) -> Task:
    """The task of a benchmark whose folder lies below `root`.

    Raises:
        MissingError: it does not.
        UserError: its folder cannot be read.
    """
    for name in benchmark.folders:
        folder = root / name
        if not folder.is_dir():
            continue
        if benchmark.suite == "composition":
            return read_path(folder)
        shards = any(any((folder / split).glob("*.tar")) for split in ("test", "train"))
        if not shards:
            return _original(benchmark, folder)
        if benchmark.probe:
            if not any((folder / "train").glob("*.tar")):
                raise MissingError(f"{folder / 'train'} holds no tars; get them from {benchmark.origin}")
            return LinearProbe(_classes(read_path(folder, "train"), folder), _classes(read_path(folder), folder))
        return read_path(folder)
    raise MissingError(f"get it from {benchmark.origin} and put it into {root / benchmark.folders[0]}")


def _classes(task: Task, folder: Path) -> Classification:
    if not isinstance(task, Classification):
        raise UserError(f"{folder}: a linear probe needs images with classes")
    return task


def _original(benchmark: Benchmark, folder: Path) -> Task:
    """The task in an original folder, as clip-benchmark defines it."""
    if benchmark.needs and not (folder / benchmark.needs).exists():
        raise MissingError(f"{folder} does not hold {benchmark.needs}; get the dataset from {benchmark.origin}")
    if benchmark.suite == "retrieval":
        return _captions(benchmark, _build(benchmark, folder, "test"))
    test = _labelled(benchmark, _build(benchmark, folder, "test"))
    return LinearProbe(_labelled(benchmark, _build(benchmark, folder, "train")), test) if benchmark.probe else test


def _build(benchmark: Benchmark, folder: Path, split: str) -> Any:
    try:
        from clip_benchmark.datasets.builder import build_dataset
    except ImportError as error:
        raise UserError(f"{EXTRA} ({error})") from None
    task = "zeroshot_retrieval" if benchmark.suite == "retrieval" else "zeroshot_classification"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # datasets without a split of their own say so
            return build_dataset(benchmark.name, root=str(folder), split=split, download=False, task=task)
    # torchvision, scipy and clip-benchmark raise different errors when a folder is not what they expect.
    except (RuntimeError, OSError, ValueError, AssertionError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MissingError(
            f"{folder} is not {benchmark.name} as it is published ({reason}); get it from {benchmark.origin}"
        ) from None


def _labelled(benchmark: Benchmark, dataset: Any) -> Classification:
    images = DatasetImages(benchmark.name, dataset)
    labels = _labels(dataset)
    return Classification(images, labels, list(dataset.classes), list(dataset.templates))


def _labels(dataset: Any) -> torch.Tensor:
    """All labels: from the dataset's own list where it has one, so that no image is decoded for it."""
    if getattr(dataset, "target_transform", None) is None:
        for name in ("targets", "_labels", "labels"):
            listed = getattr(dataset, name, None)
            if listed is not None and len(listed) == len(dataset):
                return torch.as_tensor(listed).long()
        samples = getattr(dataset, "_samples", None)
        if samples is not None and len(samples) == len(dataset):
            return torch.tensor([label for _, label in samples])
    return torch.stack([torch.as_tensor(dataset[index][1]) for index in range(len(dataset))]).long()


def _captions(benchmark: Benchmark, dataset: Any) -> CaptionRetrieval:
    if hasattr(dataset, "data"):  # Flickr: (image, captions) pairs
        listed = [list(captions) for _, captions in dataset.data]
    else:  # COCO: its index knows the captions of an image
        listed = [list(dataset._load_target(number)) for number in dataset.ids]
    owners = torch.tensor([image for image, texts in enumerate(listed) for _ in texts])
    captions = [text for texts in listed for text in texts]
    return CaptionRetrieval(DatasetImages(benchmark.name, dataset), captions, owners)
