"""How much memory a step takes, counted on a few pairs, and whether a batch can fit at all.

Weights, gradients and AdamW's moments are known from the parameters. What the towers keep of one pair for the backward
pass is counted on noise of the right shape; the loss and the towers' temporary tensors come on top.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from powerclip.alignment.regions import draw_boxes, regions_of
from powerclip.data.batch import Batch
from powerclip.data.scenes import generate
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.encoders import DualEncoder, tokenizer_for
from powerclip.errors import UserError
from powerclip.train.parallel import is_sharded, shard_count
from powerclip.train.precompute import input_shape
from powerclip.train.recipe import Recipe
from powerclip.train.state import TrainState
from powerclip.train.towers import Towers

TRAINED_BYTES = 16  # of a trained parameter: weight, gradient and AdamW's two moments in float32
FROZEN_BYTES = 4  # of a frozen one: its weight
GIB = 2**30
TYPICAL_LENGTH = 32  # tokens of a padded caption

# A compiler computes again what is cheap instead of keeping it: compiled towers keep no less than this share.
COMPILED_SHARE = 0.4


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step on one rank, in bytes."""

    state: float  # weights, gradients, moments
    pair: float  # kept by the towers of one pair for the backward pass
    pairs: int  # that are in the towers at the same time
    ranks: int

    @property
    def activations(self) -> float:
        """Kept by the towers of all pairs."""
        return self.pair * self.pairs

    @property
    def total(self) -> float:
        """All that was counted: a lower bound."""
        return self.state + self.activations


def estimate(recipe: Recipe, state: TrainState, ranks: int) -> Estimate:
    """The memory of a step of a recipe on one of so many ranks."""
    train = recipe.train
    shards = shard_count(train, ranks)
    trained = trained_parameters(state)
    frozen = count(state.encoder) + count(state.objective) - trained
    pairs = max(1, train.batch_size // ranks // train.accumulate)
    weights = (trained * TRAINED_BYTES + frozen * FROZEN_BYTES) / shards
    return Estimate(weights, activation_bytes(state), pairs, ranks)


def available(device: torch.device) -> int | None:
    """Bytes that the device has in all, used or not; None when the machine does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:  # a container may have less than its machine
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return physical
    return min(physical, limit)


def check_fits(recipe: Recipe, state: TrainState) -> None:
    """UserError when a batch cannot fit into the device's memory, whatever else happens: before any data are read."""
    if any(is_sharded(p) for p in state.encoder.parameters()):
        return  # their passes are collective, and a shard fits where a whole model may not
    problem = misfit(estimate(recipe, state, state.ranks.count), recipe, state)
    if problem:
        raise UserError(problem)


def misfit(needed: Estimate, recipe: Recipe, state: TrainState) -> str | None:
    """Why a step cannot fit into the device's memory, and what would; None where it may fit."""
    memory = available(state.device)
    share = COMPILED_SHARE if state.unwrapped_towers.compile_mode != "none" else 1.0
    if memory is None or needed.state + share * needed.activations <= memory:
        return None
    where = "the GPU" if state.device.type == "cuda" else "this machine"
    has = f"{where} has {memory / GIB:.1f} GiB"
    train, room = recipe.train, 0.8 * memory - needed.state
    if room < share * needed.pair:
        return (
            f"model: weights, gradients and AdamW's moments take {needed.state / GIB:.1f} GiB and {has}: take smaller "
            "towers, train.freeze or train.lora, or on several GPUs train.sharding=full"
        )
    fits = max(1, int(room / (share * needed.pair)))
    parts = _parts(train.batch_size // needed.ranks, fits)
    return (
        f"train.batch_size={train.batch_size:,} cannot fit: the towers keep about {needed.total / GIB:,.1f} GiB of "
        f"{needed.pairs:,} pairs at a time, and {has}; train.accumulate={parts} sends them through in parts, or take "
        f"train.batch_size={fits * needed.ranks:,}"
    )


def _parts(pairs: int, fits: int) -> int:
    """The fewest equal parts of `pairs` that are no larger than `fits`."""
    return next(parts for parts in range(max(1, -(-pairs // fits)), pairs + 1) if pairs % parts == 0)


def activation_bytes(state: TrainState, pairs: int = 2) -> float:
    """Bytes that the towers keep of one pair for the backward pass, parameters left out."""
    encoder, device = state.encoder, state.device
    parameters = {p.untyped_storage().data_ptr() for m in (encoder, state.objective) for p in m.parameters()}
    saved: dict[int, int] = {}  # storage → bytes

    def record(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    images = torch.zeros(pairs, 3, *encoder.image_size, device=device)
    tokens = torch.ones(pairs, min(TYPICAL_LENGTH, encoder.context_length), dtype=torch.long, device=device)
    eager = Towers(state.objective, encoder, bf16=state.unwrapped_towers.bf16)
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
        torch.autograd.graph.saved_tensors_hooks(record, lambda value: value),
    ):
        features = eager(images, tokens)
    del features
    return sum(saved.values()) / pairs


def synthetic_batch(recipe: Recipe, encoder: DualEncoder, pairs: int) -> Batch:
    """Noise for images and the captions and trees of embedded scenes."""
    tokenizer = CaptionTokenizer(tokenizer_for(encoder))
    scenes = [generate(0, number, "train") for number in range(pairs)]
    captions = [tokenizer.encode(scene.caption) for scene in scenes]
    tokens = tokenizer.pad([caption.ids for caption in captions], multiple=16)
    generator = torch.Generator().manual_seed(0)
    draws = draw_boxes(pairs, recipe.regions.count, generator)
    return Batch(
        images=torch.randn(pairs, *input_shape(recipe.train, encoder), generator=generator),
        tokens=tokens,
        regions=regions_of(draws, encoder.grid, recipe.regions.drawn, recipe.regions.largest),
        phrases=pack_phrases([scene.tree for scene in scenes], captions, tokens.shape[1], recipe.nodes),
        keys=[str(number) for number in range(pairs)],
        lengths=tuple(map(len, captions)),
    )


def count(module: nn.Module, *, trained: bool = False) -> int:
    """Parameters of a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def trained_parameters(state: TrainState) -> int:
    """Parameters that the optimiser moves."""
    return count(state.encoder, trained=True) + count(state.objective, trained=True)
