"""ImageNet's classes by their WordNet numbers, for folders and tars that bring no names: `n01443537` is a goldfish.

Names and templates are clip-benchmark's (extra `eval`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from powerclip.errors import UserError

_NUMBER = re.compile(r"n\d{8}")


def wordnet_number(name: str) -> str | None:
    """The number that a file or folder name begins with: `n01443537_12` → `n01443537`."""
    match = _NUMBER.match(name)
    return match[0] if match else None


def names_of(numbers: Sequence[str], where: str) -> list[str]:
    """A class name for each number.

    Raises:
        UserError: one is not among ImageNet-1k's, or clip-benchmark is not installed.
    """
    known = dict(zip(class_numbers(where), _read("en_classnames.json"), strict=True))
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise UserError(f"{where}: {unknown[0]} is no class of ImageNet-1k: name the classes in classnames.txt")
    return [known[number] for number in numbers]


def class_numbers(where: str) -> list[str]:
    """The numbers of ImageNet-1k's classes in their order."""
    try:
        from clip_benchmark.datasets.builder import all_imagenet_wordnet_ids
    except ImportError as error:
        raise UserError(
            f"{where} has WordNet numbers for classes: pip install 'powerclip[eval]' for their names ({error}), "
            "or put them into classnames.txt"
        ) from None
    return list(all_imagenet_wordnet_ids)


def templates() -> list[str]:
    """The 80 prompts."""
    return _read("en_zeroshot_classification_templates.json")


def _read(name: str) -> list[str]:
    content: dict[str, Any] = json.loads(files("clip_benchmark.datasets").joinpath(name).read_text(encoding="utf-8"))
    return list(content["imagenet1k"])
