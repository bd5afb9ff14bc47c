"""Where the images of a benchmark come from: files, tars, a dataset object; one at a time and as bytes.

Bytes, because embeddings are cached by content: an image that was embedded before is read, but not decoded.
"""

from __future__ import annotations

import io
import tarfile
import threading
import zlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from powerclip.data.captions import IMAGE_SUFFIXES, split_member
from powerclip.data.tar_index import TarDamage, iter_members
from powerclip.errors import UserError

if TYPE_CHECKING:
    from PIL import Image


PACKED = (".tar.gz", ".tgz")  # tars that are kept in memory: their members cannot be read one by one


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


@dataclass(frozen=True)
class PackedMember:
    """A file inside a compressed tar: it cannot be read where it lies, so it is kept."""

    tar: Path
    name: str
    content: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.tar}: {self.name}"


@dataclass(frozen=True)
class PackedImages:
    """Image files out of compressed tars, in memory."""

    members: Sequence[PackedMember]

    @property
    def names(self) -> Sequence[str]:
        """`shard.tar.gz: member`."""
        return [str(member) for member in self.members]

    def read(self, index: int) -> bytes:
        """The content of a member."""
        return self.members[index].content

    def decode(self, content: bytes) -> Image.Image:
        """The image in it."""
        return decode_file(content)


FoundImage = TarMember | PackedMember | Path


def find_images(paths: Sequence[Path], keys: Set[str]) -> dict[str, FoundImage]:
    """Key → image, of those keys that are in the tars and folders; a key is a file's name up to its first dot.

    Raises:
        UserError: a tar cannot be read, or two images have the same key.
    """
    images: dict[str, FoundImage] = {}
    for path in paths:
        for key, image in _images_in(path):
            if key in images:
                raise UserError(f"--images: {images[key]} and {image} have the same key {key!r}")
            if key in keys:
                images[key] = image
    return images


def _images_in(path: Path) -> Iterator[tuple[str, FoundImage]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            key, suffix = split_member(file.name)
            if file.suffix == ".tar" or file.name.endswith(PACKED):
                yield from _images_in(file)
            elif suffix in IMAGE_SUFFIXES:
                yield key, file
        return
    if path.name.endswith(PACKED):
        yield from _packed_images(path)
        return
    try:
        for member in iter_members(path):
            key, suffix = split_member(member.name)
            if suffix in IMAGE_SUFFIXES:
                yield key, TarMember(path, *member)
    except (TarDamage, OSError) as error:
        raise UserError(f"{path} cannot be read as a tar: {error}; copy it again or leave it out") from None


def _packed_images(path: Path) -> Iterator[tuple[str, PackedMember]]:
    try:
        with tarfile.open(path, "r|gz") as tar:
            for member in tar:
                key, suffix = split_member(member.name)
                file = tar.extractfile(member) if suffix in IMAGE_SUFFIXES else None
                if file is not None:
                    yield key, PackedMember(path, member.name, file.read())
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read as a compressed tar: {error}; copy it again or leave it out") from None


def image_source(images: Sequence[FoundImage]) -> TarImages | PackedImages | FileImages:
    """Images that `find_images` found, as a source.

    Raises:
        UserError: some are files, some lie in tars or in compressed ones.
    """
    members = [image for image in images if isinstance(image, TarMember)]
    packed = [image for image in images if isinstance(image, PackedMember)]
    files = [image for image in images if isinstance(image, Path)]
    kinds = [kind for kind in (files, members, packed) if kind]
    if len(kinds) > 1:
        first, second = kinds[0][0], kinds[1][0]
        raise UserError(f"--images: some images are files ({first}), others lie in tars ({second}): give one kind")
    if packed:
        return PackedImages(packed)
    return TarImages(members) if members else FileImages(files)
