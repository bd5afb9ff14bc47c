"""The trained model of the embedded parser: sentences of words in, labelled spans out; and its file."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powerclip.annotate.parsers.chart import best_trees, cell_edges, marginals
from powerclip.annotate.parsers.lexicon import Lexicon
from powerclip.annotate.parsers.network import Size, SpanNetwork
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic

GOLD = 0  # the source whose trees are imitated
_MOST_WORDS = 100_000  # word vectors in the cache; it is cleared beyond that
# Cells of a batch's charts: on a CPU they should stay in its cache, on a GPU there should be enough work.
_CELLS = {"cpu": 10_000, "cuda": 400_000}

Integers = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class DecodedPhrases:
    """The phrases of some sentences, sentence by sentence and in pre-order, as parallel arrays."""

    sentences: Integers  # numbers of the sentences, as they were given
    bounds: Integers  # where each one's phrases begin, and the end
    firsts: Integers  # first word
    ends: Integers  # one past the last
    labels: Integers


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Charts that a device has filled, or is about to fill."""

    sentences: list[int]
    length: int
    phrase: Tensor  # which cells are phrases
    label: Tensor  # each cell's best label


class ParserModel:
    """Network and lexicon, on one device."""

    def __init__(self, network: SpanNetwork, lexicon: Lexicon, device: torch.device) -> None:
        self.network = network.to(device).eval()
        self.lexicon = lexicon
        self.device = device
        self.forget()

    def forget(self) -> None:
        """Drop the vectors of the words met so far: for when the network has changed, or they are too many."""
        self.lexicon.clear()
        width = self.network.size.word_width + self.network.size.piece_width
        self._vectors = torch.zeros(1024, width, device=self.device)
        self._computed = 0

    def phrases(self, sentences: Sequence[Sequence[str]]) -> Iterator[DecodedPhrases]:
        """The best trees of `sentences`, none of them empty: those of about the same length together."""
        return self.collect(self.submit(sentences))

    @torch.inference_mode()
    def submit(self, sentences: Sequence[Sequence[str]]) -> list[Decoded]:
        """Start to parse `sentences`; a GPU may still be busy with them when this returns."""
        if len(self.lexicon.rows) > _MOST_WORDS:
            self.forget()
        row, rows = self.lexicon.row, self.lexicon.rows
        by_length: dict[int, list[int]] = defaultdict(list)
        encoded: list[list[int]] = []
        for number, words in enumerate(sentences):
            by_length[self._padded(len(words))].append(number)
            # Most words have a row already: the lookup saves a call.
            encoded.append([rows[word] if word in rows else row(word) for word in words])
        self._compute_vectors()
        started = []
        for length in sorted(by_length):
            numbers = by_length[length]
            step = max(1, _CELLS[self.device.type] * 2 // (length * (length + 1)))
            for at in range(0, len(numbers), step):
                group = numbers[at : at + step]
                phrase, label = self._decode([encoded[number] for number in group], length)
                started.append(Decoded(group, length, _to_cpu(phrase), _to_cpu(label)))
        return started

    def collect(self, started: list[Decoded]) -> Iterator[DecodedPhrases]:
        """What `submit` has started."""
        if self.device.type == "cuda" and started:
            torch.cuda.current_stream(self.device).synchronize()
        return (_collect(decoded) for decoded in started)

    def _padded(self, length: int) -> int:
        """The length that a sentence is padded to: a GPU is quicker with few large batches, a CPU without padding."""
        if self.device.type == "cpu":
            return length
        step = 2 if length <= 16 else 4 if length <= 32 else 8 if length <= 64 else 32
        return max(8, -(-length // step) * step)

    def _decode(self, encoded: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
        """Which cells are phrases, and each cell's best label, both B × cells with the cells in pre-order.

        The tree is not the most probable one but the one with the most phrases that are right rather than wrong, as
        expected under the model: each phrase counts its probability less one half.
        """
        counts = np.array([len(rows) for rows in encoded])
        table = np.ones((len(encoded), length + 2), dtype=np.int64)  # row 1 of the lexicon: the end
        table[:, 0] = 0  # and 0: the beginning
        table[:, 1:-1][np.arange(length) < counts[:, None]] = [row for rows in encoded for row in rows]
        source = torch.full((len(encoded),), GOLD, device=self.device)
        vectors = self._vectors[torch.from_numpy(table).to(self.device, non_blocking=True)]
        ragged = None if counts.min() == length else torch.from_numpy(counts)
        scores = self.network.scores(self.network.encode(vectors, source, ragged)[0])
        lengths = torch.from_numpy(counts).to(self.device, non_blocking=True)
        probability = marginals(torch.logsumexp(scores, dim=-1), lengths)
        order = _preorder(length, self.device)
        return best_trees(probability - 0.5, lengths)[:, order], scores.argmax(dim=-1).to(torch.uint8)[:, order]

    def _compute_vectors(self) -> None:
        """Vectors of the words that were met since the last call."""
        lexicon, count = self.lexicon, len(self.lexicon.vocabulary_of)
        if count > len(self._vectors):
            grown = self._vectors.new_zeros(2 * count, self._vectors.shape[1])
            grown[: self._computed] = self._vectors[: self._computed]
            self._vectors = grown
        for start in range(self._computed, count, 4096):
            end = min(count, start + 4096)
            words = torch.tensor(lexicon.vocabulary_of[start:end], device=self.device)
            pieces, offsets = lexicon.pieces(range(start, end))
            vectors = self.network.word_vectors(words, pieces.to(self.device), offsets.to(self.device))
            self._vectors[start:end] = vectors
        self._computed = count


@lru_cache(maxsize=128)
def _preorder(length: int, device: torch.device) -> Tensor:
    """Cells by their first word and then from long to short: a phrase before what is in it."""
    firsts, ends = cell_edges(length, torch.device("cpu"))
    return torch.argsort(firsts * (length + 1) - ends).to(device)


def _to_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which on a GPU may still be under way."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # other memory would wait for the GPU here
    return copy.copy_(tensor, non_blocking=True)


def _collect(decoded: Decoded) -> DecodedPhrases:
    cpu = torch.device("cpu")
    order = _preorder(decoded.length, cpu)
    firsts, ends = (edge[order].numpy() for edge in cell_edges(decoded.length, cpu))
    sentence, at = np.nonzero(decoded.phrase.numpy())
    bounds = np.searchsorted(sentence, np.arange(len(decoded.sentences) + 1))
    labels = decoded.label.numpy()[sentence, at].astype(np.int64)
    return DecodedPhrases(np.array(decoded.sentences), bounds, firsts[at], ends[at], labels)


def save_model(path: Path, network: SpanNetwork, lexicon: Lexicon) -> None:
    """Write weights in half precision, with words, labels and sizes, as one safetensors file."""
    from safetensors.torch import save

    weights = {name: weight.detach().cpu().half().contiguous() for name, weight in network.state_dict().items()}
    about = {"size": dataclasses.asdict(network.size), "words": lexicon.words, "labels": lexicon.labels}
    write_atomic(path, save(weights, {"parser": json.dumps(about, ensure_ascii=False)}))


def load_model(path: Path, device: torch.device) -> ParserModel:
    """The model that `save_model` wrote.

    Raises:
        UserError: the file is not there, or is none of these.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"parser weights {path} are not there; tools/parser/train.py in a checkout trains them")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["parser"])
            weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        size = Size(**about["size"])
        network = SpanNetwork(size)
        network.load_state_dict(weights)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} holds no weights of the embedded parser ({type(error).__name__}: {error})") from error
    return ParserModel(network, Lexicon(about["words"], about["labels"], size.buckets), device)
