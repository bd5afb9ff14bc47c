"""Embeddings for the benchmarks: computed once, kept by the content of what was embedded and of the model.

A chunk of images is one file of the cache. An interrupted evaluation loses at most one chunk, and a dataset that
shares its images with another (SugarCrepe and COCO) need not embed them again if they come in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.data.pixels import Normaliser, squash
from powerclip.data.tokens import CaptionTokenizer
from powerclip.errors import UserError
from powerclip.evaluate.embeddings import BATCH, device_of, evaluating
from powerclip.evaluate.images import ImageSource
from powerclip.evaluate.ranks import threads_for
from powerclip.evaluate.watch import Watch, unwatched
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.runtime.files import write_atomic

if TYPE_CHECKING:
    from PIL import Image

    from powerclip.encoders import DualEncoder

CHUNK = 2 * BATCH  # images in one file of the cache: about 300 MB while they are decoded for 224²
TOLERANCE = 0.001  # share of unreadable images beyond which a dataset's number would not be the dataset's


@dataclass(frozen=True)
class Embedded:
    """Embeddings of images [images, D] on the CPU; those that could not be read are zero and named."""

    vectors: Tensor
    readable: Tensor  # [images] bool
    corrupt: tuple[str, ...]


class Embedder:
    """A model as the benchmarks use it.

    Args:
        encoder: in evaluation mode while it embeds.
        tokenizer: of the model.
        cache: a folder for embeddings; None computes them each time.
        threads: that read and decode images; as many as there are cores by default, shared by the ranks on them.
        ranks: the processes that embed together. Each has all embeddings afterwards.
    """

    def __init__(
        self,
        encoder: DualEncoder,
        tokenizer: CaptionTokenizer,
        cache: Path | None = None,
        threads: int | None = None,
        ranks: Ranks = SINGLE,
    ) -> None:
        from powerclip.encoders import preprocess_for

        self.encoder = encoder
        self.tokenizer = tokenizer
        self.cache = cache
        self.ranks = ranks
        self.watch: Watch = unwatched
        self.threads = threads or threads_for(ranks)
        self._prepare = preprocess_for(encoder)
        self._model = digest_of(encoder) if cache is not None else b""

    def images(self, source: ImageSource) -> Embedded:
        """Embeddings of all images.

        Raises:
            UserError: more than 0.1 % of them cannot be read.
        """
        vectors = torch.zeros(len(source.names), self.encoder.embed_dim)

        def embed(chunk: range, pool: ThreadPoolExecutor) -> Tensor:
            vectors[chunk.start : chunk.stop], readable = self._chunk(source, chunk, pool)
            return readable

        readable = self._in_chunks(source, embed)
        return _checked(self.ranks.sum(vectors), readable, source.names)

    def patches(self, source: ImageSource, use: Callable[[Sequence[int], Tensor], None]) -> Embedded:
        """Hand the patches [images, N, D] of some images after the other to `use`, with their places.

        Whole images, squashed to the tower's size: a box of theirs keeps its place, in shares. Under torchrun, `use`
        sees this rank's images only. The result tells which could be read; patches are too many to be kept.

        Raises:
            UserError: more than 0.1 % of them cannot be read.
        """
        device, wants = device_of(self.encoder), self.encoder.clip.visual.preprocess_cfg
        normalise = Normaliser(wants["mean"], wants["std"])

        def load(place: int) -> Tensor | None:
            content = _read(source, place)
            return _decode(lambda: normalise(squash(_pixels(source.decode(content)), self.encoder.image_size))[0])

        def embed(chunk: range, pool: ThreadPoolExecutor) -> Tensor:
            pixels = dict(zip(chunk, pool.map(load, chunk), strict=True))
            readable = [place for place, found in pixels.items() if found is not None]
            for start in range(0, len(readable), BATCH):
                places = readable[start : start + BATCH]
                batch = torch.stack([found for place in places if (found := pixels[place]) is not None])
                use(places, self.encoder.encode_patches(batch.to(device))[1])
            return torch.tensor([pixels[place] is not None for place in chunk])

        return _checked(torch.zeros(len(source.names), 0), self._in_chunks(source, embed), source.names)

    def _in_chunks(self, source: ImageSource, embed: Callable[[range, ThreadPoolExecutor], Tensor]) -> Tensor:
        """Let `embed` work on this rank's chunks of places; which images of all ranks could be read [images]."""
        count = len(source.names)
        readable = torch.zeros(count, dtype=torch.uint8)
        chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
        mine = [chunk for number, chunk in enumerate(chunks) if self._is_mine(number)]
        done, total = 0, sum(map(len, mine))
        self.watch(done, total)
        with ThreadPoolExecutor(self.threads) as pool, evaluating(self.encoder):
            for chunk in mine:
                readable[chunk.start : chunk.stop] = embed(chunk, pool)
                done += len(chunk)
                self.watch(done, total)
        return self.ranks.sum(readable).bool()

    def _is_mine(self, number: int) -> bool:
        """Whether a piece of work falls to this rank. What it leaves zero, others fill: a sum is the whole."""
        return number % self.ranks.count == self.ranks.rank

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Embeddings [texts, D] on the CPU."""
        # Half a character, which JSON can hold, has bytes as well.
        key = self._key([text.encode(errors="surrogatepass") for text in texts], "texts")
        found = self.ranks.broadcast(lambda: self._load(key))
        if found is None:
            unique = list(dict.fromkeys(texts))
            place = {text: number for number, text in enumerate(unique)}
            with evaluating(self.encoder):
                vectors = self._encode_texts(unique)
            found = {"vectors": vectors[torch.tensor([place[text] for text in texts])]}
            if self.ranks.is_main:
                self._store(key, found)
        return found["vectors"]

    def _encode_texts(self, texts: Sequence[str]) -> Tensor:
        device = device_of(self.encoder)
        # Sorted by length, so that short texts are not padded to the longest of all.
        ids = [self.tokenizer.encode(text).ids for text in texts]
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        vectors = torch.zeros(len(ids), self.encoder.embed_dim)
        for number, start in enumerate(range(0, len(order), BATCH)):
            if self._is_mine(number):
                places = order[start : start + BATCH]
                tokens = self.tokenizer.pad([ids[place] for place in places])
                vectors[torch.tensor(places)] = self.encoder.encode_text(tokens.to(device)).float().cpu()
        return self.ranks.sum(vectors)

    def prepare(self, source: ImageSource, content: bytes) -> Tensor:
        """An image as the model reads it [3, H, W], from the content that `images.read` gave."""
        return self._prepare(source.decode(content))

    def _chunk(self, source: ImageSource, places: range, pool: ThreadPoolExecutor) -> tuple[Tensor, Tensor]:
        contents = list(pool.map(lambda place: _read(source, place), places))
        key = self._key(contents, "images")
        found = self._load(key)
        if found is None:
            # The pool decodes ahead while the encoder works.
            prepared = pool.map(lambda content: _decode(lambda: self.prepare(source, content)), contents)
            vectors, readable = self._encode_images(prepared)
            found = {"vectors": vectors, "readable": readable}
            self._store(key, found)
        return found["vectors"], found["readable"]

    def _encode_images(self, prepared: Iterable[Tensor | None]) -> tuple[Tensor, Tensor]:
        device = device_of(self.encoder)
        parts: list[Tensor] = []
        batch: list[Tensor] = []
        readable: list[bool] = []

        def encode() -> None:
            if batch:
                parts.append(self.encoder.encode_image(torch.stack(batch).to(device)).float().cpu())
                batch.clear()

        for pixels in prepared:
            readable.append(pixels is not None)
            if pixels is not None:
                batch.append(pixels)
            if len(batch) == BATCH:
                encode()
        encode()
        mask = torch.tensor(readable)
        vectors = torch.zeros(len(readable), self.encoder.embed_dim)
        if parts:
            vectors[mask] = torch.cat(parts)
        return vectors, mask

    def _key(self, contents: Sequence[bytes], kind: str) -> str:
        if self.cache is None:
            return ""
        total = hashlib.blake2b(self._model + kind.encode(), digest_size=20)
        for content in contents:
            total.update(hashlib.blake2b(content, digest_size=20).digest())
        return total.hexdigest()

    def _load(self, key: str) -> dict[str, Tensor] | None:
        if self.cache is None or not (path := self.cache / f"{key}.safetensors").is_file():
            return None
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(path.read_bytes())
        except SafetensorError:
            return None  # torn by a crash of the machine: made anew

    def _store(self, key: str, tensors: dict[str, Tensor]) -> None:
        if self.cache is not None:
            from safetensors.torch import save

            write_atomic(self.cache / f"{key}.safetensors", save({k: t.contiguous() for k, t in tensors.items()}))


def digest_of(encoder: DualEncoder) -> bytes:
    """A hash of everything that an embedding depends on: the weights, the towers, the preparation of images."""
    total = hashlib.blake2b(digest_size=20)
    about = [encoder.config, encoder.clip.visual.preprocess_cfg]
    total.update(json.dumps(about, sort_keys=True, default=str).encode())
    for name, value in sorted(encoder.clip.state_dict().items()):
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.digest()


def _checked(vectors: Tensor, readable: Tensor, names: Sequence[str]) -> Embedded:
    """The embeddings, unless too many are missing."""
    corrupt = tuple(names[place] for place in (~readable).nonzero()[:, 0].tolist())
    if len(corrupt) > TOLERANCE * len(names):
        shown = "; ".join(corrupt[:3]) + (f"; and {len(corrupt) - 3:,} more" if len(corrupt) > 3 else "")
        raise UserError(
            f"{len(corrupt):,} of {len(names):,} images cannot be read ({shown}): "
            "more than 0.1 %, restore them or remove them from the dataset"
        )
    return Embedded(vectors, readable, corrupt)


def _decode(decode: Callable[[], Tensor]) -> Tensor | None:
    """What `decode` gives, or nothing for a damaged image."""
    from PIL import Image

    try:
        return decode()
    # Pillow meets damaged files with these: cut short, broken chunks, absurd sizes.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _pixels(image: Image.Image) -> Tensor:
    """An image as bytes [1, 3, H, W]."""
    import numpy as np

    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


def _read(source: ImageSource, place: int) -> bytes:
    """The content, or nothing where an image cannot even be read: counted with those that cannot be decoded."""
    try:
        return source.read(place)
    except (OSError, ValueError, SyntaxError):
        return b""
