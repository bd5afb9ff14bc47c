"""Where the images of a benchmark come from: files, tars, a dataset object; one at a time and as bytes.

Bytes, because embeddings are cached by content: an image that was embedded before is read, but not decoded.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from PIL import Image


class ImageSource(Protocol):
    """Images that can be read one by one, from several threads."""

    @property
    def names(self) -> Sequence[str]:
        """What messages call each image."""
        ...

    def read(self, index: int) -> bytes:
        """The content of one image."""
        ...

    def decode(self, content: bytes) -> Image.Image:
        """The image that `read` gave the content of."""
        ...


def decode_file(content: bytes) -> Image.Image:
    """The image in an image file's content, in RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def pack_pixels(image: Image.Image) -> bytes:
    """An RGB image that has no file as content: its pixels, with their size in front."""
    return f"{image.width} {image.height}\n".encode() + image.tobytes()


def unpack_pixels(content: bytes) -> Image.Image:
    """The image that `pack_pixels` made content of."""
    from PIL import Image

    head, _, pixels = content.partition(b"\n")
    width, height = map(int, head.split())
    return Image.frombytes("RGB", (width, height), pixels)


@dataclass(frozen=True)
class FileImages:
    """Image files."""

    paths: Sequence[Path]

    @property
    def names(self) -> Sequence[str]:
        """Their paths."""
        return [str(path) for path in self.paths]

    def read(self, index: int) -> bytes:
        """The content of a file."""
        return self.paths[index].read_bytes()

    def decode(self, content: bytes) -> Image.Image:
        """The image in it."""
        return decode_file(content)


@dataclass(frozen=True)
class TarMember:
    """A file inside a tar: where its content lies."""

    tar: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.tar}: {self.name}"


@dataclass(frozen=True)
class TarImages:
    """Image files inside tars, read where they lie."""

    members: Sequence[TarMember]
    _open: threading.local = field(default_factory=threading.local)

    @property
    def names(self) -> Sequence[str]:
        """`shard.tar: member`."""
        return [str(member) for member in self.members]

    def read(self, index: int) -> bytes:
        """The content of a member."""
        member = self.members[index]
        # Each thread keeps the tar that it read last open: members come in order.
        opened: tuple[Path, BinaryIO] | None = getattr(self._open, "file", None)
        if opened is None or opened[0] != member.tar:
            if opened is not None:
                opened[1].close()
            opened = (member.tar, member.tar.open("rb"))
            self._open.file = opened
        opened[1].seek(member.offset)
        return opened[1].read(member.size)

    def decode(self, content: bytes) -> Image.Image:
        """The image in it."""
        return decode_file(content)


@dataclass(frozen=True)
class DatasetImages:
    """Images of a dataset object (torchvision's, clip-benchmark's) whose items begin with a PIL image."""

    name: str
    dataset: Any

    @property
    def names(self) -> Sequence[str]:
        """`name, item 17`, or the file where the dataset knows it."""
        listed = getattr(self.dataset, "samples", None) or getattr(self.dataset, "_image_files", None)
        if listed is not None and len(listed) == len(self.dataset):
            return [str(entry[0] if isinstance(entry, tuple) else entry) for entry in listed]
        return [f"{self.name}, item {index}" for index in range(len(self.dataset))]

    def read(self, index: int) -> bytes:
        """The pixels, with their size in front."""
        return pack_pixels(self.dataset[index][0].convert("RGB"))

    def decode(self, content: bytes) -> Image.Image:
        """The image with these pixels."""
        return unpack_pixels(content)
