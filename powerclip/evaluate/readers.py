"""A user's own data as a benchmark: class folders, tables of captions, a JSON of hard negatives, webdataset tars.

The kind of data is recognised from the files:

    folder/CLASS/*.jpg                classification; `classnames.txt` and `templates.txt` may lie beside the classes
    data.csv, .tsv, .jsonl, .parquet  retrieval: a table of images and captions, as training reads it
    folder/NAME.jpg, folder/NAME.txt  retrieval: images, each with a file of captions
    negatives.json                    SugarCrepe's format; images beside it or in `images/`
    folder/*.tar, folder/test/*.tar   webdataset: `.cls` makes it classification, `.npy` multi-label, captions retrieval
    folder/examples.jsonl             Winoground's layout
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from powerclip.data.captions import IMAGE_SUFFIXES, captions_in, split_member
from powerclip.data.columns import Columns
from powerclip.data.table import NO_IMAGE, is_table, read_table
from powerclip.data.tar_index import TarDamage, iter_members
from powerclip.data.trees import shorten
from powerclip.errors import UserError
from powerclip.evaluate import imagenet
from powerclip.evaluate.embedder import TOLERANCE
from powerclip.evaluate.images import FileImages, TarImages, TarMember, find_images, image_source
from powerclip.evaluate.metrics import KINDS
from powerclip.evaluate.tasks import CaptionPairs, CaptionRetrieval, Classification, HardNegatives, Task

DEFAULT_TEMPLATES = ("a photo of a {c}.",)


def read_path(path: Path, split: str = "test", columns: Columns | None = None) -> Task:
    """The benchmark at `path`; `split` is the folder of tars that is read where there are several.

    `columns` are those of a table that hold images and captions, where the user names them.

    Raises:
        UserError: the path does not exist, or holds nothing of a known kind.
    """
    if path.is_file():
        suffix = path.suffix.lower()
        if is_table(path):
            return read_captions(path, columns)
        if suffix == ".json":
            return read_negatives(path)
        if suffix == ".tar":
            return read_tars([path], path.parent)
        raise UserError(f"{path}: not a benchmark that can be read (a folder, a table, .json or .tar)")
    if not path.is_dir():
        raise UserError(f"there is no file or folder {path}")
    if (path / "examples.jsonl").is_file():
        return read_winoground(path)
    if any((path / f"{kind}.json").is_file() for kind in KINDS):
        return read_sugarcrepe(path)
    tars = _tars(path / split) or _tars(path)
    if tars:
        return read_tars(tars, path)
    return read_captions(path) if is_table(path) else read_class_folders(path)


def read_class_folders(folder: Path) -> Classification:
    """Images in one folder for each class, classes in the order of the folders' names.

    Raises:
        UserError: no folder holds an image, or the class names do not fit the folders.
    """
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    labelled = [(label, image) for label, sub in enumerate(folders) for image in _images_below(sub)]
    if not labelled:
        raise UserError(
            f"{folder} holds no benchmark that is known: images in class folders or with .txt files, tars,"
            " SugarCrepe's or Winoground's files"
        )
    images, labels = FileImages([image for _, image in labelled]), torch.tensor([label for label, _ in labelled])
    names, numbers = _lines(folder / "classnames.txt"), [imagenet.wordnet_number(sub.name) for sub in folders]
    wordnet = [number for number in numbers if number]
    if not names and len(wordnet) == len(folders):
        names = imagenet.names_of(wordnet, str(folder))
        return Classification(images, labels, names, _templates(folder, imagenet.templates()))
    names = names or [sub.name.replace("_", " ") for sub in folders]
    if len(names) != len(folders):
        raise UserError(
            f"{folder / 'classnames.txt'} has {len(names)} lines, but there are {len(folders)} class folders"
        )
    return Classification(images, labels, names, _templates(folder))


def read_captions(path: Path, columns: Columns | None = None) -> CaptionRetrieval:
    """Retrieval from a table, or from a folder of images with their texts: what training reads of the same table.

    Raises:
        UserError: it cannot be read, columns are in doubt, no row can be used, or more than 0.1 % of the images are
            not there.
    """
    table = read_table(path, columns)
    missing = table.left_out.get(NO_IMAGE, 0)
    if missing > TOLERANCE * (len(table) + missing):
        raise UserError(
            f"{path}: {missing:,} of {len(table) + missing:,} images are not there, the first {table.first[NO_IMAGE]}: "
            "more than 0.1 %, restore them or remove their rows"
        )
    captions = [table.texts(number) for number in range(len(table))]
    images = FileImages([table.file(number) for number in range(len(table))])
    return replace(_retrieval(images, captions), note="; ".join([table.note, *table.complaints()]))


def read_negatives(path: Path, images: Sequence[Path] = ()) -> HardNegatives:
    """Hard negatives in SugarCrepe's format; an item may say its `kind`, the file's name is the kind otherwise.

    Images lie in `images/` or beside the file, or in the tars and folders that are named.

    Raises:
        UserError: it is not in that format, or all of its images are missing.
    """
    folder = path.parent / "images" if (path.parent / "images").is_dir() else path.parent
    items = _read_items(path, path.stem, folder)
    if not images:
        return _negatives(items, folder)
    key_of = {item.image: split_member(item.image.name)[0] for item in items}
    found = find_images(images, set(key_of.values()))
    usable = [item for item in items if key_of[item.image] in found]
    if not usable:
        raise UserError(f"{', '.join(map(str, images))}: none of the images that {path} names is there")
    index = {key: number for number, key in enumerate(dict.fromkeys(key_of[item.image] for item in usable))}
    return HardNegatives(
        image_source([found[key] for key in index]),
        torch.tensor([index[key_of[item.image]] for item in usable]),
        [item.caption for item in usable],
        [item.negative for item in usable],
        [item.kind for item in usable],
        len(items) - len(usable),
    )


def read_sugarcrepe(folder: Path) -> HardNegatives:
    """SugarCrepe (Hsieh et al., NeurIPS 2023): `replace_obj.json`, `swap_att.json`, … as they are published.

    The images (COCO val2017) lie in `val2017/` or `images/`. Items whose image is missing are counted and left out.

    Raises:
        UserError: the folder holds none of these files, one is damaged, or all images are missing.
    """
    files = [(kind, folder / f"{kind}.json") for kind in KINDS if (folder / f"{kind}.json").is_file()]
    if not files:
        raise UserError(f"{folder} holds none of SugarCrepe's files ({KINDS[0]}.json, …)")
    images = next((folder / name for name in ("val2017", "images") if (folder / name).is_dir()), folder / "images")
    return _negatives([item for kind, path in files for item in _read_items(path, kind, images)], images)


def read_winoground(folder: Path) -> CaptionPairs:
    """Winoground as it is published: `examples.jsonl`, images in `images/`.

    Raises:
        UserError: a line cannot be read, or an image is missing.
    """
    path = folder / "examples.jsonl"
    captions: list[str] = []
    images: list[Path] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            item = json.loads(line)
            captions += [str(item[f"caption_{side}"]) for side in (0, 1)]
            images += [folder / "images" / f"{item[f'image_{side}']}" for side in (0, 1)]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: expected image_0, image_1, caption_0 and caption_1") from None
    images = [image if image.suffix else image.with_suffix(".png") for image in images]
    missing = [image for image in images if not image.is_file()]
    if missing or not images:
        raise UserError(f"{path}: {f'there is no image {missing[0]}' if missing else 'it is empty'}")
    return CaptionPairs(FileImages(images), captions)


@dataclass
class _Sample:
    """The content of one sample in a tar."""

    image: TarMember | None = None
    label: Any = None
    captions: list[str] = field(default_factory=list)


def read_tars(tars: Sequence[Path], folder: Path) -> Classification | CaptionRetrieval:
    """Webdataset tars, clip-benchmark's or img2dataset's; class names and templates lie in `folder`.

    Raises:
        UserError: a tar cannot be read, no sample has an image and a label or captions, or class names are missing.
    """
    samples = _read_samples(tars)
    if all(sample.label is not None for sample in samples):
        names, images, labels = _lines(folder / "classnames.txt"), _images(samples), _labels(samples)
        if names:
            return Classification(images, labels, names, _templates(folder))
        if _is_imagenet(samples, str(folder)):
            names = imagenet.names_of(imagenet.class_numbers(str(folder)), str(folder))
            return Classification(images, labels, names, _templates(folder, imagenet.templates()))
        raise UserError(f"{folder / 'classnames.txt'} is missing: it names the classes, one in each line")
    return _tar_captions(samples, "a label (.cls, .npy) or captions")


def read_caption_tars(tars: Sequence[Path]) -> CaptionRetrieval:
    """The images and captions of webdataset tars, whatever else they hold.

    Raises:
        UserError: a tar cannot be read, or an image has no caption.
    """
    return _tar_captions(_read_samples(tars), "captions")


def _tar_captions(samples: Sequence[_Sample], needed: str) -> CaptionRetrieval:
    for sample in samples:
        if not sample.captions and sample.image:
            raise UserError(f"{sample.image}: every image needs {needed} (.txt, .json) beside it")
    return _retrieval(_images(samples), [sample.captions for sample in samples])


def _images(samples: Sequence[_Sample]) -> TarImages:
    return TarImages([sample.image for sample in samples if sample.image])


def _labels(samples: Sequence[_Sample]) -> torch.Tensor:
    """One class for each sample, or zeros and ones for all classes.

    Raises:
        UserError: one has something else; the message names its image.
    """
    width = len(samples[0].label) if isinstance(samples[0].label, list) else None
    for sample in samples:
        label = sample.label
        if width is None:
            fits = isinstance(label, int) and label >= 0
        else:
            fits = isinstance(label, list) and len(label) == width and all(one in (0, 1) for one in label)
        if not fits:
            wanted = "a class number, from 0 on" if width is None else f"{width} zeros and ones"
            raise UserError(f"{sample.image}: its label must be {wanted}, got {shorten(str(label))}")
    return torch.tensor([sample.label for sample in samples])


def _is_imagenet(samples: Sequence[_Sample], where: str) -> bool:
    """Whether files are called by WordNet numbers and labelled by their order in ImageNet-1k."""
    numbered = [
        (imagenet.wordnet_number(sample.image.name.rpartition("/")[2]), sample.label)
        for sample in samples
        if sample.image is not None
    ]
    if any(number is None for number, _ in numbered):
        return False
    label_of = {number: label for label, number in enumerate(imagenet.class_numbers(where))}
    return all(label_of.get(number or "") == label for number, label in numbered)


def _read_samples(tars: Sequence[Path]) -> list[_Sample]:
    """The samples with an image; the members of one need not lie together."""
    samples: dict[tuple[Path, str], _Sample] = {}
    for tar in tars:
        try:
            with tar.open("rb") as file:
                for member in iter_members(tar):
                    key, suffix = split_member(member.name)
                    sample = samples.setdefault((tar, f"{member.name.rpartition('/')[0]}/{key}"), _Sample())
                    if suffix in IMAGE_SUFFIXES:
                        sample.image = TarMember(tar, *member)
                    elif suffix in ("cls", "npy", "txt", "json"):
                        file.seek(member.offset)
                        _read_member(sample, suffix, file.read(member.size))
        except (TarDamage, EOFError, OSError, ValueError, RecursionError) as error:
            raise UserError(f"{tar} cannot be read: {error}; copy it again or leave it out") from None
    with_image = [sample for sample in samples.values() if sample.image]
    if not with_image:
        raise UserError(f"{tars[0]} holds no image (.{', .'.join(IMAGE_SUFFIXES)})")
    return with_image


def _read_member(sample: _Sample, suffix: str, content: bytes) -> None:
    if suffix == "cls":
        sample.label = int(content)
    elif suffix == "npy":
        import numpy as np

        sample.label = np.load(io.BytesIO(content), allow_pickle=False).tolist()
    elif suffix == "txt":
        sample.captions = [line.strip() for line in content.decode("utf-8").splitlines() if line.strip()]
    else:
        sample.captions = sample.captions or [caption for _, caption in captions_in(json.loads(content))]


def _retrieval(images: FileImages | TarImages, captions: Sequence[Sequence[str]]) -> CaptionRetrieval:
    owners = torch.tensor([image for image, texts in enumerate(captions) for _ in texts])
    return CaptionRetrieval(images, [text for texts in captions for text in texts], owners)


@dataclass(frozen=True)
class _Item:
    """One comparison of SugarCrepe's."""

    kind: str
    image: Path
    caption: str
    negative: str


def _read_items(path: Path, kind: str, images: Path) -> list[_Item]:
    """The comparisons in {"0": {"filename", "caption", "negative_caption"}, …}; one may say its own `kind`."""
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
        rows = list(entries.values()) if isinstance(entries, Mapping) else entries
        items = [
            _Item(row.get("kind", kind), images / row["filename"], row["caption"], row["negative_caption"])
            for row in rows
        ]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: expected items with filename, caption and negative_caption") from None
    for number, item in enumerate(items):
        if not all(isinstance(text, str) for text in (item.kind, item.caption, item.negative)):
            raise UserError(f"{path}, item {number}: kind, caption and negative_caption must be texts")
    return items


def _negatives(items: Sequence[_Item], images: Path) -> HardNegatives:
    exists = {image: image.is_file() for image in {item.image for item in items}}
    usable = [item for item in items if exists[item.image]]
    if not usable:
        raise UserError(f"{images} holds none of the images that the comparisons name")
    index = {image: number for number, image in enumerate(dict.fromkeys(item.image for item in usable))}
    return HardNegatives(
        FileImages(list(index)),
        torch.tensor([index[item.image] for item in usable]),
        [item.caption for item in usable],
        [item.negative for item in usable],
        [item.kind for item in usable],
        len(items) - len(usable),
    )


def _images_below(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower().lstrip(".") in IMAGE_SUFFIXES and path.is_file()
    )


def _templates(folder: Path, default: Sequence[str] = DEFAULT_TEMPLATES) -> Sequence[str]:
    names = ("zeroshot_classification_templates.txt", "templates.txt")
    return next((lines for name in names if (lines := _lines(folder / name))), default)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line.strip() for line in _text(path).splitlines() if line.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text in UTF-8 ({error})") from None


def _tars(folder: Path) -> list[Path]:
    """In the order of their numbers, as clip-benchmark counts its shards."""
    return sorted(folder.glob("*.tar"), key=lambda path: (len(path.stem), path.stem)) if folder.is_dir() else []
