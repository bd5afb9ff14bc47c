"""The towers as training runs them: in which precision, compiled or not, for which objective.

From the loop to the model a batch passes three calls: `Towers.forward`, `Objective.encode_images` and
`DualEncoder.image_features`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from powerclip.data.batch import Batch
from powerclip.encoders import DualEncoder, Features
from powerclip.encoders.dual import join_groups
from powerclip.encoders.text import text_blocks
from powerclip.encoders.vision import image_blocks
from powerclip.objectives import Objective, Plan
from powerclip.runtime.compile import compile_shapes, raise_limit
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.train.sections import TrainSection

# Not at all · each tower as a whole · the same, replayed as CUDA graphs · each transformer block by itself
CompileMode = Literal["none", "towers", "graphs", "blocks"]


class Towers(nn.Module):
    """Both towers as an objective runs them: what DistributedDataParallel and FSDP wrap.

    The objective is no part of the module: its own parameters are few, and only its loss uses them, outside of any
    wrapper.

    Args:
        objective: plans for images and runs them through their tower.
        encoder: the towers.
        bf16: compute in bf16 where autocast allows it.
        compile: what is compiled. CUDA graphs are for one forward and one backward pass a step, on one rank; their
            results must be used before the next step overwrites them.
        sharded: the weights are sharded over ranks. Then only blocks can be compiled, as weights come and go between
            them.
    """

    def __init__(
        self,
        objective: Objective,
        encoder: DualEncoder,
        *,
        bf16: bool = False,
        compile: CompileMode = "none",
        sharded: bool = False,
    ):
        super().__init__()
        self.encoder = encoder
        self.bf16, self.compile_mode, self._sharded = bf16, compile, sharded
        self._objective = (objective,)  # in a tuple: nn.Module would make it a part
        if compile == "blocks":
            raise_limit()
            for block in transformer_blocks(encoder):
                block.compile(dynamic=False)

    @property
    def objective(self) -> Objective:
        """What the towers are run for."""
        return self._objective[0]

    @torch.no_grad()
    def plan(self, images: Tensor, generator: torch.Generator | None = None, ranks: Ranks = SINGLE) -> Plan:
        """What the objective decides on for images [C, 3, H, W] before they go through the towers.

        Without a generator, torch's own draws the random numbers.
        """
        shape = self.objective.noise_shape(self.encoder)
        if shape is None:
            return Plan()
        noise = draw_uniform((len(images), *shape), images.device, generator, ranks)
        plan: Callable[..., Plan] = type(self.objective).plan
        # Compiled, as some methods compare all pairs of an image's patches.
        plan = plan if self.compile_mode == "none" or self._sharded else compiled(plan)
        with self._autocast(images.device):
            return plan(self.objective, self.encoder, images, noise, ranks)

    @torch.no_grad()
    def with_further_texts(
        self, batch: Batch, generator: torch.Generator | None = None, ranks: Ranks = SINGLE
    ) -> Batch:
        """The batch with the further texts that the objective makes of it; the same batch where there are none."""
        shape = self.objective.text_noise_shape()
        if shape is None:
            return batch
        noise = draw_uniform((len(batch), *shape), batch.tokens.device, generator, ranks)
        return replace(batch, further=self.objective.further_texts(batch, noise))

    def forward(
        self,
        images: Tensor,
        tokens: Tensor | tuple[Tensor, ...],
        plan: Plan | None = None,
        further: Tensor | None = None,
    ) -> Features:
        """The features of images [C, 3, H, W] and tokens [C, L], for the objective's loss.

        Tokens may come in several groups of rows, each with its own L. Without the plan of these images one is made.
        `further` are tokens [E, L'] of further texts.
        """
        plan = self.plan(images) if plan is None else plan
        groups = tokens if isinstance(tokens, tuple) else (tokens,)
        dense = self.objective.dense
        # Methods as functions of their objects: what is compiled for one encoder and objective fits the next.
        encode_images = self._compiled(type(self.objective).encode_images)
        encode_words = self._compiled(DualEncoder.encode_words)
        with self._autocast(images.device), self._attention(images.device):
            of_images = encode_images(self.objective, self.encoder, images, plan)
            of_captions = [encode_words(self.encoder, group, dense=dense) for group in groups]
            features = self.encoder.join_features(of_images, *join_groups(of_captions))
            if further is not None:
                text, words = encode_words(self.encoder, further, dense=dense)
                features = replace(features, further_text=text, further_words=words)
        # FSDP registers hooks on what is returned, and they would not survive an in-place change of a view.
        return tree_map(_without_view, features) if self._sharded else features

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.compile_mode not in ("towers", "graphs"):
            return function
        return compiled(function, graphs=self.compile_mode == "graphs" and torch.is_grad_enabled())

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _attention(self, device: torch.device) -> AbstractContextManager[Any]:
        """On a CPU the fused attention's gradient is slow in bf16: a third of the backward pass of a text tower."""
        slow = self.bf16 and device.type == "cpu" and self.compile_mode == "none"
        return sdpa_kernel(SDPBackend.MATH) if slow else nullcontext()


def make_towers(
    settings: TrainSection, objective: Objective, encoder: DualEncoder, device: torch.device, ranks: Ranks
) -> Towers:
    """The towers for a recipe's settings."""
    sharded = settings.sharding != "none" and not ranks.is_single
    mode: CompileMode = "towers" if is_compiled(settings, device) else "none"
    if mode == "towers" and (sharded or settings.compile == "blocks"):
        mode = "blocks"
    elif mode == "towers" and settings.compile == "auto" and ranks.is_single and settings.accumulate == 1:
        mode = "graphs" if device.type == "cuda" else mode
    return Towers(objective, encoder, bf16=in_bf16(settings, device), compile=mode, sharded=sharded)


def in_bf16(settings: TrainSection, device: torch.device) -> bool:
    """Whether the towers compute in bf16 under these settings."""
    return settings.precision in ("bf16", "fp8") or (settings.precision == "auto" and device.type == "cuda")


def is_compiled(settings: TrainSection, device: torch.device) -> bool:
    """Whether the towers are compiled under these settings."""
    return settings.compile in ("always", "blocks") or (settings.compile == "auto" and device.type == "cuda")


@cache
def compiled(function: Callable[..., Any], *, graphs: bool = False) -> Callable[..., Any]:
    """The function, compiled once for a process: later runs with towers of the same structure find it warm.

    As CUDA `graphs` it is replayed, one graph for each shape: a few launches instead of thousands.
    """
    return compile_shapes(function, mode="reduce-overhead" if graphs else None)


def draw_uniform(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None, ranks: Ranks = SINGLE
) -> Tensor:
    """Uniform numbers in [0, 1) for the rows of this rank.

    All ranks draw for the whole batch, with generators of one seed, and each keeps its rows: an image gets the same
    numbers on any number of ranks.
    """
    rows, *rest = shape
    return torch.rand(rows * ranks.count, *rest, generator=generator, device=device)[ranks.rows(rows)]


def transformer_blocks(encoder: DualEncoder) -> list[nn.Module]:
    """The blocks of both towers, in the order in which they run."""
    clip = encoder.clip
    return [*image_blocks(clip.visual), *text_blocks(clip)]


def _without_view(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value
