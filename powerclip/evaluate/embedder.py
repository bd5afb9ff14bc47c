"""Embeddings for the benchmarks: computed once, kept by the content of what was embedded and of the model.

A chunk of pictures is one file of the cache. An interrupted evaluation loses at most one chunk, and a dataset that
shares its pictures with another (SugarCrepe and COCO) need not embed them again if they come in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.data.tokens import CaptionTokenizer
from powerclip.errors import UserError
from powerclip.evaluate.embeddings import BATCH, device_of, evaluating
from powerclip.evaluate.pictures import Pictures
from powerclip.files import write_whole

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

CHUNK = 512  # pictures in one file of the cache: about 300 MB while they are decoded for 224²
TOLERANCE = 0.001  # share of unreadable pictures beyond which a dataset's number would not be the dataset's


@dataclass(frozen=True)
class Embedded:
    """Embeddings of pictures [pictures, D] on the CPU; those that could not be read are zero and named."""

    vectors: Tensor
    readable: Tensor  # [pictures] bool
    corrupt: tuple[str, ...]


class Embedder:
    """A model as the benchmarks use it.

    Args:
        encoder: in evaluation mode while it embeds.
        tokenizer: of the model.
        cache: a folder for embeddings; None computes them each time.
        threads: that read and decode pictures; as many as there are cores by default.
    """

    def __init__(
        self, encoder: DualEncoder, tokenizer: CaptionTokenizer, cache: Path | None = None, threads: int | None = None
    ) -> None:
        from powerclip.encoders import preprocess_for

        self.encoder = encoder
        self.tokenizer = tokenizer
        self.cache = cache
        self.threads = threads or os.cpu_count() or 1
        self._prepare = preprocess_for(encoder)
        self._model = digest_of(encoder) if cache is not None else b""

    def pictures(self, pictures: Pictures) -> Embedded:
        """Embeddings of all pictures.

        Raises:
            UserError: more than 0.1 % of them cannot be read.
        """
        names = pictures.names
        chunks = [range(start, min(start + CHUNK, len(names))) for start in range(0, len(names), CHUNK)]
        with ThreadPoolExecutor(self.threads) as pool, evaluating(self.encoder):
            parts = [self._chunk(pictures, chunk, pool) for chunk in chunks]
        vectors = torch.cat([vector for vector, _ in parts])
        readable = torch.cat([mask for _, mask in parts])
        corrupt = tuple(names[place] for place in (~readable).nonzero()[:, 0].tolist())
        if len(corrupt) > TOLERANCE * len(names):
            shown = "; ".join(corrupt[:3]) + (f"; and {len(corrupt) - 3:,} more" if len(corrupt) > 3 else "")
            raise UserError(
                f"{len(corrupt):,} of {len(names):,} pictures cannot be read ({shown}): "
                "more than 0.1 %, restore them or remove them from the dataset"
            )
        return Embedded(vectors, readable, corrupt)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Embeddings [texts, D] on the CPU."""
        key = self._key([text.encode() for text in texts], "texts")
        found = self._load(key)
        if found is None:
            unique = list(dict.fromkeys(texts))
            place = {text: number for number, text in enumerate(unique)}
            with evaluating(self.encoder):
                vectors = torch.cat(list(self._encode_texts(unique)))
            found = {"vectors": vectors[torch.tensor([place[text] for text in texts])]}
            self._store(key, found)
        return found["vectors"]

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[Tensor]:
        device = device_of(self.encoder)
        # Sorted by length, so that short texts are not padded to the longest of all; then put back.
        ids = [self.tokenizer.encode(text).ids for text in texts]
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        parts = [
            self.encoder.encode_text(
                self.tokenizer.pad([ids[place] for place in order[start : start + BATCH]]).to(device)
            )
            for start in range(0, len(order), BATCH)
        ]
        sorted_vectors = torch.cat(parts).float().cpu()
        vectors = torch.empty_like(sorted_vectors)
        vectors[torch.tensor(order)] = sorted_vectors
        yield vectors

    def _chunk(self, pictures: Pictures, places: range, pool: ThreadPoolExecutor) -> tuple[Tensor, Tensor]:
        contents = list(pool.map(lambda place: _read(pictures, place), places))
        key = self._key(contents, "pictures")
        found = self._load(key)
        if found is None:
            # The pool decodes ahead while the encoder works.
            prepared = pool.map(lambda content: self._decode(pictures, content), contents)
            vectors, readable = self._encode_pictures(prepared)
            found = {"vectors": vectors, "readable": readable}
            self._store(key, found)
        return found["vectors"], found["readable"]

    def _encode_pictures(self, prepared: Iterable[Tensor | None]) -> tuple[Tensor, Tensor]:
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

    def _decode(self, pictures: Pictures, content: bytes) -> Tensor | None:
        from PIL import Image

        try:
            return self._prepare(pictures.decode(content)) if content else None
        # Pillow meets damaged files with these: cut short, broken chunks, absurd sizes.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None

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
        from safetensors.torch import load

        return load(path.read_bytes())

    def _store(self, key: str, tensors: dict[str, Tensor]) -> None:
        if self.cache is not None:
            from safetensors.torch import save

            write_whole(self.cache / f"{key}.safetensors", save({k: t.contiguous() for k, t in tensors.items()}))


def digest_of(encoder: DualEncoder) -> bytes:
    """A hash of everything that an embedding depends on: the weights, the towers, the preparation of pictures."""
    total = hashlib.blake2b(digest_size=20)
    about = [encoder.config, encoder.clip.visual.preprocess_cfg]
    total.update(json.dumps(about, sort_keys=True, default=str).encode())
    for name, value in sorted(encoder.clip.state_dict().items()):
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.digest()


def _read(pictures: Pictures, place: int) -> bytes:
    """The content, or nothing where a picture cannot even be read: counted with those that cannot be decoded."""
    try:
        return pictures.read(place)
    except (OSError, ValueError, SyntaxError):
        return b""
