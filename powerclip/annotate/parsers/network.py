"""The embedded parser's network: word vectors, a bidirectional LSTM, and a score for each label of each span.

The states between two words (what was read up to there from the left, and from the right) describe a span's two ends;
a small network turns each pair of ends into label scores. Axes: B sentences, n words, D width, cells as in `chart`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from powerclip.annotate.parsers.chart import cell_edges


@dataclass(frozen=True)
class Size:
    """Widths of the network."""

    words: int  # vocabulary
    labels: int
    word_width: int = 96
    buckets: int = 8192  # rows of the table of word pieces
    piece_width: int = 128
    hidden: int = 208  # of each direction of the LSTM
    layers: int = 2
    span_width: int = 192
    sources: int = 2  # gold and silver


class SpanNetwork(nn.Module):
    """Label scores of all spans of a batch of sentences."""

    def __init__(self, size: Size, dropout: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.dropout = dropout
        self.word = nn.Embedding(size.words, size.word_width)
        self.pieces = nn.EmbeddingBag(size.buckets, size.piece_width, mode="mean", include_last_offset=True)
        self.source = nn.Embedding(size.sources, size.word_width + size.piece_width)
        widths = [size.word_width + size.piece_width, *[2 * size.hidden] * (size.layers - 1)]
        self.lstm = nn.ModuleList(nn.LSTM(width, size.hidden, batch_first=True, bidirectional=True) for width in widths)
        self.start = nn.Linear(2 * size.hidden, size.span_width)
        self.end = nn.Linear(2 * size.hidden, size.span_width, bias=False)
        self.label = nn.Linear(size.span_width, size.labels)
        nn.init.normal_(self.word.weight, std=0.1)
        nn.init.normal_(self.pieces.weight, std=0.3)
        nn.init.zeros_(self.source.weight)

    def word_vectors(self, words: Tensor, pieces: Tensor, offsets: Tensor) -> Tensor:
        """Vectors of some words, W × D: rows of the vocabulary, and their pieces end to end with W + 1 offsets."""
        return torch.cat([self.word(words), self.pieces(pieces, offsets)], dim=-1)

    def encode(self, vectors: Tensor, source: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States between the words, B × (n + 1) × 2H, and the first layer's of the words, B × n × 2H.

        Args:
            vectors: B × (n + 2) × D, with the marks of begin and end.
            source: B, whose trees to imitate.
            lengths: B, words of each sentence, on the CPU; None when all have n.
        """
        hidden = vectors + self.source(source)[:, None]
        first = None
        for lstm in self.lstm:
            hidden = self._drop(hidden)
            if lengths is None:
                hidden, _ = lstm(hidden)
            else:
                packed = pack_padded_sequence(hidden, lengths + 2, batch_first=True, enforce_sorted=False)
                hidden, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=vectors.shape[1])
            first = hidden if first is None else first
        assert first is not None
        hidden = self._drop(hidden)
        forward, backward = hidden.chunk(2, dim=-1)
        return torch.cat([forward[:, :-1], backward[:, 1:]], dim=-1), first[:, 1:-1]

    def scores(self, between: Tensor) -> Tensor:
        """Label scores of all spans, B × cells × labels; "no phrase" is 0 and has no column."""
        firsts, ends = cell_edges(between.shape[1] - 1, between.device)
        start, end = self.start(between), self.end(between)
        span = start[:, firsts] + end[:, ends]
        return self.label(F.dropout(F.relu(span), self.dropout, self.training))

    def _drop(self, hidden: Tensor) -> Tensor:
        """Dropout with the same mask at each word: noise that the LSTM cannot average away."""
        if not self.training or not self.dropout:
            return hidden
        keep = hidden.new_empty(hidden.shape[0], 1, hidden.shape[2]).bernoulli_(1 - self.dropout)
        return hidden * keep / (1 - self.dropout)
