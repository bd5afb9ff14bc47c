"""What a tar calls a sample, and what its captions are: the same for annotation, training and evaluation."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import PurePosixPath

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
CAPTION_SUFFIXES = ("json", "txt")


def split_member(name: str) -> tuple[str, str]:
    """The key and the suffix of a tar's member: `("00012", "jpg")` for `./00012.jpg`."""
    key, _, suffix = PurePosixPath(name).name.partition(".")
    return key, suffix.lower()


def read_captions(data: bytes, suffix: str) -> list[str]:
    """The captions in a sample's `.json` ({"captions": […]} or {"caption": …}) or `.txt`; blank ones are left out."""
    return [caption for _, caption in number_captions(data, suffix)]


def number_captions(data: bytes, suffix: str) -> list[tuple[int, str]]:
    """The same with their numbers, by which trees are found: blank ones are left out, and counted."""
    text = data.decode("utf-8", errors="replace")
    if suffix == "txt":
        return [(0, text.strip())] if text.strip() else []
    try:
        return captions_in(json.loads(text))
    except (json.JSONDecodeError, RecursionError):
        return []


def captions_in(fields: object) -> list[tuple[int, str]]:
    """The numbered captions in what a sample's `.json` holds; none when it has neither of the two keys."""
    value = fields.get("captions") or fields.get("caption") if isinstance(fields, dict) else None
    listed = value if isinstance(value, list) else [value]
    return [(number, caption) for number, caption in enumerate(listed) if isinstance(caption, str) and caption.strip()]


def is_text(caption: str) -> bool:
    """Whether a tokenizer can read it: a JSON string may hold half of a character, and zero bytes are no text."""
    try:
        caption.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in caption


def content_hash(content: str | bytes) -> int:
    """64 bits that tell one caption, or one image's file, from another."""
    # A lone surrogate can stand in a JSON string; it must have a hash as well.
    data = content.encode("utf-8", errors="surrogatepass") if isinstance(content, str) else content
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
