"""The pictures of the page: drawn scenes, free photographs, a folder of one's own, and uploads that are kept in memory.

Every picture is decoded, brought to at most `LONGEST` pixels a side and encoded again before anything is served: what
the page shows is never the bytes that someone sent, and no upload is written to a disk.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from powerclip.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_BYTES = 12 * 2**20  # of an upload
MOST_PIXELS = 40_000_000  # of an upload, decoded: 120 MB
LONGEST = 768  # side of a picture as it is kept and shown
THUMBNAIL = 160
MOST_UPLOADS = 48
MOST_FILES = 200  # of a folder
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")

# Test scenes of seed 0 whose captions the embedded parser reads as they are meant, and an edit of each caption. The
# quickstart's PowerCLIP and the model in the package find both objects of the first three and miss one in the last.
_SCENES = (
    (91, "A plain purple moon on the right of a large orange star"),
    (138, "there is a pink circle above a large orange square"),
    (123, "a small striped pink diamond appears over a large striped yellow cross"),
    (59, "a small yellow star is over a small orange square."),
)
# What scikit-image ships free of rights: astronaut NASA, public domain; coffee Rachel Michetti, chelsea Stéfan van der
# Walt, rocket SpaceX, all CC0.
_PHOTOGRAPHS = (
    ("coffee", "a cup of coffee on a wooden table", "a glass of water on a wooden table"),
    ("rocket", "a rocket on a launch pad under a blue sky", "a blue sky over a rocket on a launch pad"),
    ("chelsea", "the face of a cat with green eyes", "the face of a dog with green eyes"),
    ("astronaut", "a smiling woman in an orange suit in front of a flag", "a flag behind a woman in an orange suit"),
)


class Recent(Generic[Key, Value]):
    """The last few results by key; safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """The value, which is then the latest one; None where it is not known, or not any more."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: Key, value: Value) -> Value:
        """Keep a value and forget the oldest one if there are too many."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


@dataclass(frozen=True)
class Picture:
    """A picture as the page knows it."""

    id: str
    title: str
    caption: str = ""  # an example of what to ask
    second: str = ""  # an edit of it
    source: str = ""  # scene, photograph, folder, upload


class PictureStore:
    """Pictures by their ids.

    Args:
        folder: pictures of one's own, which come first.

    Raises:
        UserError: no such folder, or no picture in it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._makers: dict[str, Callable[[], Image.Image]] = {}
        self.listed: list[Picture] = []
        self._uploads: Recent[str, Image.Image] = Recent(MOST_UPLOADS)
        self._images: Recent[str, Image.Image] = Recent(MOST_UPLOADS)
        self._encoded: Recent[tuple[str, int], tuple[bytes, str]] = Recent(4 * MOST_UPLOADS)
        for picture, make in [*(_from_folder(folder) if folder else ()), *_scenes(), *_photographs()]:
            self.listed.append(picture)
            self._makers[picture.id] = make

    def upload(self, content: bytes) -> Picture:
        """Keep an uploaded picture in memory, under its hash.

        Raises:
            UserError: it is too large or not a picture that can be read.
        """
        image = decode_upload(content)
        name = hashlib.sha256(content).hexdigest()[:24]
        self._uploads.put(f"upload-{name}", image)
        return Picture(f"upload-{name}", "your picture", source="upload")

    def image(self, name: str) -> Image.Image:
        """The picture with this id.

        Raises:
            UserError: there is none, or not any more.
        """
        uploaded = self._uploads.get(name)
        if uploaded is not None:
            return uploaded
        if name not in self._makers:
            lost = "the server keeps uploads for a while only: choose the file again"
            raise UserError(f"there is no such picture{': ' + lost if name.startswith('upload-') else ''}")
        return self._images.get(name) or self._images.put(name, self._makers[name]())

    def encoded(self, name: str, longest: int = LONGEST) -> tuple[bytes, str]:
        """The picture as a file with sides of at most `longest` pixels, and its media type."""
        known = self._encoded.get((name, longest))
        if known is not None:
            return known
        image = self.image(name)
        if max(image.size) > longest:
            image = image.copy()
            image.thumbnail((longest, longest))
        buffer = io.BytesIO()
        # Scenes have few colours and sharp edges.
        if name.startswith("scene-"):
            image.save(buffer, "PNG", optimize=True)
            return self._encoded.put((name, longest), (buffer.getvalue(), "image/png"))
        image.save(buffer, "JPEG", quality=88)
        return self._encoded.put((name, longest), (buffer.getvalue(), "image/jpeg"))


def decode_upload(content: bytes) -> Image.Image:
    """The picture in a file that a stranger sent, upright and at most `LONGEST` pixels a side.

    Raises:
        UserError: it is too large or not a picture that can be read.
    """
    from PIL import Image, ImageOps

    from powerclip.data.decode import to_rgb

    if len(content) > MOST_BYTES:
        raise UserError(f"this file has {len(content) / 2**20:.0f} MB: at most {MOST_BYTES // 2**20} MB are accepted")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            # The header says how many pixels a file will unfold to, before any is decoded.
            if image.width * image.height > MOST_PIXELS:
                raise UserError(f"this picture has more than {MOST_PIXELS / 1e6:.0f} million pixels")
            image.draft("RGB", (LONGEST, LONGEST))
            # Upright, as browsers show it.
            upright = to_rgb(ImageOps.exif_transpose(image))
            upright.thumbnail((LONGEST, LONGEST))
            return upright
    except UserError:
        raise
    except Image.DecompressionBombError:
        raise UserError(f"this picture has more than {MOST_PIXELS / 1e6:.0f} million pixels") from None
    except Exception:  # a broken or hostile file makes readers raise almost anything
        raise UserError("this file is not a picture that can be read: choose a JPEG, PNG, WebP, GIF or BMP") from None


def _from_folder(folder: Path) -> Iterator[tuple[Picture, Callable[[], Image.Image]]]:
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: --pictures names a folder with pictures")
    root = folder.resolve()
    # A link may lead out of the folder: what it leads to is not shown.
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in _SUFFIXES and path.is_file() and path.resolve().is_relative_to(root)
    ]
    if not files:
        raise UserError(f"no picture in {folder}: it needs files that end in {', '.join(_SUFFIXES)}")
    for path in files[:MOST_FILES]:
        name = "file-" + hashlib.sha256(path.name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        title = path.name.encode("utf-8", "replace").decode()

        def make(path: Path = path) -> Image.Image:
            if not path.resolve().is_relative_to(root):
                raise UserError("this picture has left its folder")
            try:
                return decode_upload(path.read_bytes())
            except OSError as error:
                raise UserError(f"this picture cannot be read any more: {error.strerror}") from None

        yield Picture(name, title, source="folder"), make


def _scenes() -> Iterator[tuple[Picture, Callable[[], Image.Image]]]:
    from powerclip.data.scenes import generate

    for number, (index, second) in enumerate(_SCENES):
        caption = generate(0, index, "test").caption

        def make(index: int = index) -> Image.Image:
            from PIL import Image

            from powerclip.data.scenes import generate, render

            return Image.fromarray(render([generate(0, index, "test")], 512)[0].permute(1, 2, 0).numpy())

        yield Picture(f"scene-{number + 1}", f"scene {number + 1}", caption, second, "scene"), make


def _photographs() -> Iterator[tuple[Picture, Callable[[], Image.Image]]]:
    for name, caption, second in _PHOTOGRAPHS:

        def make(name: str = name) -> Image.Image:
            import skimage.data
            from PIL import Image

            image = Image.fromarray(getattr(skimage.data, name)())
            image.thumbnail((LONGEST, LONGEST))
            return image

        yield Picture(name, name, caption, second, "photograph"), make
