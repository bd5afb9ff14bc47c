"""Embeddings for the benchmarks: images, patches, texts and phrases, by the model's own preprocessing.

The same code embeds during training, after it and in every command, so that a score does not depend on which of them
measured it. Under torchrun each rank embeds some of the chunks, and all have all embeddings afterwards.

A chunk of images is one file of the cache. An interrupted evaluation loses at most one chunk, and a dataset that
shares its images with another (SugarCrepe and COCO) need not embed them again if they come in the same order.

Axes: n images · N patches · T phrases · D width
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from powerclip.alignment.phrases import embed_leaves, embed_nodes
from powerclip.data.tokens import CaptionTokenizer, TokenizedCaption, pack_phrases
from powerclip.data.trees import Tree
from powerclip.errors import UserError
from powerclip.evaluate.images import ImageSource
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.runtime.files import write_atomic

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

BATCH = 250
CHUNK = 2 * BATCH  # images in one file of the cache: about 300 MB while they are decoded for 224²
TOLERANCE = 0.001  # share of unreadable images beyond which a dataset's number would not be the dataset's
MOST_PIXELS = 4 << 30  # bytes of prepared images that are kept for the next evaluation: 7,000 at 224²


class OnProgress(Protocol):
    """Called with the progress of this rank."""

    def __call__(self, done: int, *, total: int) -> None:
        """`done` of `total` images are embedded."""


@dataclass(frozen=True)
class Embedded:
    """Embeddings of images [n, D] on the CPU; those that could not be read are zero and named."""

    vectors: Tensor
    readable: Tensor  # [n] bool
    corrupt: tuple[str, ...]


class PixelStore:
    """Prepared images, for several embedders of the same images: models of a study, evaluations of a run.

    Kept by how they were prepared and by their content, as many as fit into `limit` bytes.
    """

    def __init__(self, limit: int = MOST_PIXELS) -> None:
        self._limit = limit
        self._kept: dict[tuple[str, bytes], Tensor] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, preparation: str, content: bytes, prepare: Callable[[], Tensor]) -> Tensor:
        """The image with this content [3, H, W], prepared now if it is not stored."""
        key = (preparation, hashlib.blake2b(content, digest_size=16).digest())
        pixels = self._kept.get(key)
        if pixels is None:
            pixels = prepare()
            with self._lock:
                if key not in self._kept and self._bytes + pixels.nbytes <= self._limit:
                    self._kept[key] = pixels
                    self._bytes += pixels.nbytes
        return pixels


class Embedder:
    """A model as the benchmarks use it: in evaluation mode and without gradients, afterwards as it was.

    Args:
        encoder: the model, on the device that shall compute; it may be one that is being trained.
        tokenizer: the model's.
        cache: a folder for embeddings; None computes them each time.
        threads: how many threads read and decode images; by default the cores, divided by the ranks that share them.
        ranks: the processes that embed together. All must make the same calls in the same order.
        pixels: prepared images that this embedder shares with others.
    """

    def __init__(
        self,
        encoder: DualEncoder,
        tokenizer: CaptionTokenizer,
        cache: Path | None = None,
        *,
        threads: int | None = None,
        ranks: Ranks = SINGLE,
        pixels: PixelStore | None = None,
    ) -> None:
        from powerclip.encoders.self_attention import use_packed_attention

        # Training uses it too: the scores of a model must not change in the last digits when it is loaded.
        use_packed_attention(encoder)
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.cache = cache
        self.ranks = ranks
        self.threads = threads or _threads(ranks)
        self.on_progress: OnProgress = lambda done, *, total: None
        self._prepare = _Preparation(encoder, pixels)
        self._prepare_squashed = _Preparation(encoder, pixels, resize_mode="squash")
        self._last: tuple[ImageSource, Embedded] | None = None

    @property
    def device(self) -> torch.device:
        """Where the encoder's weights are."""
        return next(self.encoder.parameters()).device

    @cached_property
    def digest(self) -> bytes:
        """A hash of everything that an embedding depends on: the weights, the towers, the preparation of images."""
        total = hashlib.blake2b(digest_size=20)
        about = [self.encoder.config, self.encoder.clip.visual.preprocess_cfg]
        total.update(json.dumps(about, sort_keys=True, default=str).encode())
        for name, value in sorted(self.encoder.clip.state_dict().items()):
            total.update(name.encode())
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return total.digest()

    # ---- images ------------------------------------------------------------------------------------------------------

    def images(self, source: ImageSource) -> Embedded:
        """Global embeddings of all images. Those of the last source are kept: the next task may need the same.

        Raises:
            UserError: more than 0.1 % of them cannot be read.
        """
        if self._last is None or self._last[0] is not source:
            vectors = torch.zeros(len(source.names), self.encoder.embed_dim)

            def embed(chunk: range, pool: ThreadPoolExecutor) -> Tensor:
                vectors[chunk.start : chunk.stop], readable = self._embed_chunk(source, chunk, pool)
                return readable

            readable = self._in_chunks(source, embed)
            self._last = source, self._checked(self.ranks.sum(vectors), readable, source.names)
        return self._last[1]

    def patches(
        self, source: ImageSource, use: Callable[[Sequence[int], Tensor], None], *, squash: bool = True
    ) -> Embedded:
        """Hand the patches [batch, N, D] of all images to `use`, batch by batch, with the images' numbers.

        Whole images, squashed to the tower's size: a box keeps its relative position, whereas a model that crops would
        not see every box. Without `squash`, images are prepared as for global embeddings. Under torchrun, `use` sees
        this rank's images only. The result has no vectors; it says which images could be read.

        Raises:
            UserError: more than 0.1 % of them cannot be read.
        """

        prepare = self._prepare_squashed if squash else self._prepare

        def embed(chunk: range, pool: ThreadPoolExecutor) -> Tensor:
            readable = torch.zeros(len(chunk), dtype=torch.bool)
            for rows, batch in _batches(prepare.map(source, chunk, pool)):
                use([chunk[row] for row in rows], self.encoder.encode_patches(batch.to(self.device))[1])
                readable[rows] = True
            return readable

        return self._checked(torch.zeros(len(source.names), 0), self._in_chunks(source, embed), source.names)

    def check_images(self, source: ImageSource) -> tuple[str, ...]:
        """Decode all images, so that damage shows before hours of training; the names of those that cannot be read.

        Raises:
            UserError: more than 0.1 % of them cannot be read.
        """

        def decode(chunk: range, pool: ThreadPoolExecutor) -> Tensor:
            return torch.tensor([pixels is not None for pixels in self._prepare.map(source, chunk, pool)])

        return self._checked(torch.zeros(len(source.names), 0), self._in_chunks(source, decode), source.names).corrupt

    def _in_chunks(self, source: ImageSource, embed: Callable[[range, ThreadPoolExecutor], Tensor]) -> Tensor:
        """Let `embed` work on this rank's chunks of numbers; which images of all ranks could be read [n]."""
        count = len(source.names)
        readable = torch.zeros(count, dtype=torch.uint8)
        chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
        mine = [chunk for number, chunk in enumerate(chunks) if self._is_mine(number)]
        done, total = 0, sum(map(len, mine))
        self.on_progress(done, total=total)
        with ThreadPoolExecutor(self.threads) as pool, evaluating(self.encoder):
            for chunk in mine:
                readable[chunk.start : chunk.stop] = embed(chunk, pool)
                done += len(chunk)
                self.on_progress(done, total=total)
        return self.ranks.sum(readable).bool()

    def _is_mine(self, number: int) -> bool:
        """Whether this rank embeds the chunk or batch of this number. A sum over ranks then joins the results."""
        return number % self.ranks.count == self.ranks.rank

    def _embed_chunk(self, source: ImageSource, chunk: range, pool: ThreadPoolExecutor) -> tuple[Tensor, Tensor]:
        """Embeddings [chunk, D], and which images could be read [chunk]."""
        contents = list(pool.map(lambda number: _read(source, number), chunk))
        key = self._key(contents, "images")
        cached = self._load(key)
        if cached is None:
            # The pool decodes ahead while the encoder works.
            prepared = pool.map(lambda content: self._prepare(source, content), contents)
            vectors = torch.zeros(len(chunk), self.encoder.embed_dim)
            readable = torch.zeros(len(chunk), dtype=torch.bool)
            for rows, batch in _batches(prepared):
                vectors[rows] = self.encoder.encode_image(batch.to(self.device)).float().cpu()
                readable[rows] = True
            cached = {"vectors": vectors, "readable": readable}
            self._store(key, cached)
        return cached["vectors"], cached["readable"]

    def _checked(self, vectors: Tensor, readable: Tensor, names: Sequence[str]) -> Embedded:
        """The embeddings, unless too many are missing."""
        corrupt = tuple(names[number] for number in (~readable).nonzero()[:, 0].tolist())

        def check() -> Embedded:
            if len(corrupt) > TOLERANCE * len(names):
                shown = "; ".join(corrupt[:3]) + (f"; and {len(corrupt) - 3:,} more" if len(corrupt) > 3 else "")
                raise UserError(
                    f"{len(corrupt):,} of {len(names):,} images cannot be read ({shown}): "
                    "more than 0.1 %, restore them or remove them from the dataset"
                )
            return Embedded(vectors, readable, corrupt)

        return self.ranks.raise_on_all(check)

    # ---- texts -------------------------------------------------------------------------------------------------------

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Global embeddings [texts, D] on the CPU."""
        # JSON can hold a lone surrogate, which UTF-8 cannot encode.
        key = self._key([text.encode(errors="surrogatepass") for text in texts], "texts")
        cached = self.ranks.broadcast(lambda: self._load(key)) if self.cache is not None else None
        if cached is None:
            number = {text: row for row, text in enumerate(dict.fromkeys(texts))}
            vectors = self._in_batches(list(number), self._encode_texts)
            cached = {"vectors": vectors[torch.tensor([number[text] for text in texts])]}
            if self.ranks.is_main:
                self._store(key, cached)
        return cached["vectors"]

    def phrases(self, captions: Sequence[str], trees: Sequence[Tree]) -> Tensor:
        """p_B (Eqs. 3 and 4) of every node of every caption's tree [T, D] on the CPU, in the order of the trees.

        A node is pooled from the words of its whole caption, as in training. One that lies beyond the context length
        cannot be told from its caption, and gets the caption's p_B.
        """
        nodes = [
            (caption, Tree(tree.leaves, (node,)))
            for caption, tree in zip(captions, trees, strict=True)
            for node in tree.nodes
        ]
        return self._in_batches([caption for caption, _ in nodes], self._encode_nodes, [tree for _, tree in nodes])

    def _in_batches(self, texts: Sequence[str], encode: Callable[..., Tensor], *extra: Sequence[Any]) -> Tensor:
        """`encode` of texts, and of what `extra` holds for each of them, in batches that the ranks share."""
        # Sorted by length, so that short texts are not padded to the longest of all.
        lengths = [len(self.tokenizer.encode(text).ids) for text in texts]
        order = sorted(range(len(texts)), key=lengths.__getitem__)
        vectors = torch.zeros(len(texts), self.encoder.embed_dim)
        with evaluating(self.encoder):
            for number, start in enumerate(range(0, len(order), BATCH)):
                if self._is_mine(number):
                    rows = order[start : start + BATCH]
                    parts = ([part[row] for row in rows] for part in (texts, *extra))
                    vectors[torch.tensor(rows)] = encode(*parts).float().cpu()
        return self.ranks.sum(vectors)

    def _encode_texts(self, texts: Sequence[str]) -> Tensor:
        tokens = self.tokenizer.pad([self.tokenizer.encode(text).ids for text in texts])
        return self.encoder.encode_text(tokens.to(self.device))

    def _encode_nodes(self, captions: Sequence[str], trees: Sequence[Tree]) -> Tensor:
        """p_B [T, D] of trees of one node each."""
        number = {caption: row for row, caption in enumerate(dict.fromkeys(captions))}
        tokenized = [self.tokenizer.encode(caption) for caption in number]
        tokens = self.tokenizer.pad([caption.ids for caption in tokenized])
        _, words = self.encoder.encode_words(tokens.to(self.device))
        owners = [number[caption] for caption in captions]
        return embed_single_nodes(words, owners, trees, [tokenized[owner] for owner in owners])[0]

    # ---- the cache ---------------------------------------------------------------------------------------------------

    def _key(self, contents: Sequence[bytes], kind: str) -> str:
        if self.cache is None:
            return ""
        total = hashlib.blake2b(self.digest + kind.encode(), digest_size=20)
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
            return None  # truncated by a crash of the machine: computed again

    def _store(self, key: str, tensors: dict[str, Tensor]) -> None:
        if self.cache is not None:
            from safetensors.torch import save

            write_atomic(self.cache / f"{key}.safetensors", save({k: t.contiguous() for k, t in tensors.items()}))


class _Preparation:
    """A model's evaluation transform, its own or one that squashes, for content that may be damaged."""

    def __init__(
        self, encoder: DualEncoder, pixels: PixelStore | None, resize_mode: Literal["squash"] | None = None
    ) -> None:
        from powerclip.encoders import preprocess_for

        settings = encoder.clip.visual.preprocess_cfg
        self._transform = preprocess_for(encoder, resize_mode=resize_mode)
        used = {**settings, "resize_mode": resize_mode or settings.get("resize_mode")}
        self._name = json.dumps(used, sort_keys=True, default=str)
        self._pixels = pixels

    def __call__(self, source: ImageSource, content: bytes) -> Tensor | None:
        """The image [3, H, W] as the model reads it; None where it is damaged."""
        from PIL import Image

        try:
            if self._pixels is None:
                return self._transform(source.decode(content))
            return self._pixels.get(self._name, content, lambda: self._transform(source.decode(content)))
        # What Pillow raises for damaged files: cut short, broken chunks, absurd sizes.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None

    def map(self, source: ImageSource, chunk: range, pool: ThreadPoolExecutor) -> Iterator[Tensor | None]:
        """The images with these numbers, read and prepared by the threads of a pool."""
        contents = pool.map(lambda number: _read(source, number), chunk)
        return pool.map(lambda content: self(source, content), contents)


def embed_single_nodes(
    words: Tensor, owners: Sequence[int], trees: Sequence[Tree], tokenized: Sequence[TokenizedCaption]
) -> tuple[Tensor, Tensor]:
    """p_B [T, D] of trees of one node each, and how many leaves it has [T].

    A row for each node instead of each caption: packing merges nodes that the context length made equal.

    Args:
        words: of the captions [C, L, D].
        owners: which caption each node is of [T].
        trees: its caption's leaves, and the node alone [T].
        tokenized: its caption [T].
    """
    phrases = pack_phrases(trees, tokenized, words.shape[1]).to(words.device)
    rows = words[torch.tensor(owners, device=words.device)]
    return embed_nodes(embed_leaves(rows, phrases), phrases), phrases.node_end - phrases.node_start


@contextmanager
def evaluating(encoder: DualEncoder) -> Iterator[None]:
    """The encoder in evaluation mode, without gradients; afterwards as it was."""
    training = encoder.training
    encoder.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        encoder.train(training)


def _batches(prepared: Iterable[Tensor | None]) -> Iterator[tuple[list[int], Tensor]]:
    """The images that could be read, at most BATCH at a time: their rows among all, and pixels [batch, 3, H, W]."""
    rows: list[int] = []
    batch: list[Tensor] = []
    for row, pixels in enumerate(prepared):
        if pixels is not None:
            rows.append(row)
            batch.append(pixels)
        if len(batch) == BATCH:
            yield rows, torch.stack(batch)
            rows, batch = [], []
    if batch:
        yield rows, torch.stack(batch)


def _read(source: ImageSource, number: int) -> bytes:
    """The content, or nothing where an image cannot even be read: counted with those that cannot be decoded."""
    try:
        return source.read(number)
    except (OSError, ValueError, SyntaxError):
        return b""


def _threads(ranks: Ranks) -> int:
    """Threads that may read images: the cores, shared by the ranks on this machine."""
    local_ranks = 1 if ranks.is_single else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (os.cpu_count() or 1) // local_ranks)
