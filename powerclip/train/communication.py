"""What the ranks of a run send each other in one step, estimated: bytes for each GPU, and the time that links take.

W ranks, C pairs in the global batch, D width, K nodes of a caption, P trained parameters. Everything is float32.
A ring moves (W-1)/W of a gathered tensor through each GPU, and twice that for a sum that all ranks get:

    gradients    2 (W-1)/W · 4 P        all-reduce; overlaps with the backward pass
    embeddings   2 (W-1)/W · 4 · 2 C D  image and caption gathered, and their gradients scattered back
    phrases      2 (W-1)/W · 4 · C K D  PowerCLIP: the nodes of all captions, and their gradients
    columns      2 (W-1)/W · 4 · 4 C    PowerCLIP: maxima and sums of each caption's column, both directions
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 4


@dataclass(frozen=True)
class Links:
    """How fast GPUs send, bytes a second: each to its neighbour in the machine, and a whole machine to the next.

    A ring passes each link between two machines once; several adapters carry several rings, each a part of the data.
    """

    name: str
    inside: float
    between: float
    gpus: int = 8  # in a machine
    latency: float = 5e-6  # of a step of the ring inside a machine, seconds
    latency_between: float = 15e-6


# Data sheets: fourth-generation NVLink, 450 GB/s each way, and eight 400 Gb/s adapters in a machine, or one of 100.
FAST = Links("NVLink and 8 × 400 Gb/s", 450e9, 8 * 50e9)
SLOW = Links("NVLink and 100 Gb/s", 450e9, 12.5e9)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step."""

    gradients: float
    embeddings: float
    phrases: float
    columns: float

    @property
    def exposed(self) -> float:
        """Bytes that overlap with no computation: the loss needs them before the backward pass begins."""
        return self.embeddings + self.phrases + self.columns

    @property
    def total(self) -> float:
        """All bytes."""
        return self.gradients + self.exposed


def traffic(ranks: int, pairs: int, width: int, parameters: int, nodes: float = 0.0) -> Traffic:
    """What each of `ranks` GPUs sends for a global batch of `pairs`; `nodes` is the mean K, 0 without alignment."""
    share = 2 * (ranks - 1) / ranks * BYTES
    return Traffic(
        gradients=share * parameters,
        embeddings=share * 2 * pairs * width,
        phrases=share * pairs * nodes * width,
        columns=share * 4 * pairs if nodes else 0.0,
    )


def seconds(sent: float, ranks: int, links: Links) -> float:
    """How long a ring over `ranks` GPUs takes for `sent` bytes of each: its slowest link, and the hops' latency."""
    machines = -(-ranks // links.gpus)
    near, far = 2 * (ranks - machines), 2 * (machines - 1)  # hops inside a machine, and from one to the next
    rate = min(links.inside, links.between) if machines > 1 else links.inside
    return sent / rate + near * links.latency + far * links.latency_between


def parallel_efficiency(compute: float, sent: Traffic, ranks: int, links: Links, overlap: float = 0.5) -> float:
    """Share of a step that is not spent waiting for messages, when one takes `compute` seconds by itself.

    `overlap` is the part of `compute`, the backward pass, that gradients can hide behind.
    """
    if ranks == 1:
        return 1.0
    gradients = max(0.0, seconds(sent.gradients, ranks, links) - overlap * compute)
    return compute / (compute + gradients + seconds(sent.exposed, ranks, links))
