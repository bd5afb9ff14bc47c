"""How the towers run while training: in which precision, compiled or not, wrapped for several ranks or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powerclip.encoders.dual import join_groups
from powerclip.encoders.text import text_tower
from powerclip.objectives import Objective, encode
from powerclip.objectives.plan import Plan
from powerclip.runtime.compile import compile_shapes, raise_limit
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.train.recipe import TrainSection

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder, Features


def in_bf16(settings: TrainSection, device: torch.device) -> bool:
    """Whether the towers compute in bf16 under these settings."""
    return settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")


def is_compiled(settings: TrainSection, device: torch.device) -> bool:
    """Whether the towers are compiled under these settings."""
    return settings.compile in ("always", "blocks") or (settings.compile == "auto" and device.type == "cuda")


def run_towers(
    settings: TrainSection,
    objective: Objective,
    encoder: DualEncoder,
    images: Tensor,
    tokens: Tensor | tuple[Tensor, ...],
    plan: Plan | None = None,
    *,
    compiled: bool | None = None,
    graphs: bool = False,
) -> Features:
    """The features of a batch as `objective` needs them; compiled as the settings say unless told otherwise."""
    device = images.device
    compiled = is_compiled(settings, device) if compiled is None else compiled
    run = compiled_encode(graphs=graphs) if compiled else encode
    with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16(settings, device)):
        return run(objective, encoder, images, tokens, plan)


@cache
def compiled_encode(backend: str | Callable[..., Any] = "inductor", *, graphs: bool = False) -> Callable[..., Features]:
    """`encode`, compiled once for a process: later runs with towers of the same structure find it warm.

    The towers are compiled apart, so that captions of a new length cost the text tower's compilation alone. As CUDA
    `graphs` they are replayed, one for each shape: the host launches a few things instead of thousands. Their results
    must be used before the next step overwrites them.
    """
    mode = "reduce-overhead" if graphs else None
    of_images, of_captions = (
        compile_shapes(encode_images, backend, mode),
        compile_shapes(encode_captions, backend, mode),
    )

    def run(
        objective: Objective,
        encoder: DualEncoder,
        images: Tensor,
        tokens: Tensor | tuple[Tensor, ...],
        plan: Plan | None = None,
    ) -> Features:
        plan = objective.plan_alone(encoder, images) if plan is None else plan
        groups = tokens if isinstance(tokens, tuple) else (tokens,)
        fields = of_images(objective, encoder, images, plan)
        captions = [of_captions(encoder, group, objective.dense) for group in groups]
        return objective.join(encoder, fields, join_groups(captions))

    return run


def encode_images(objective: Objective, encoder: DualEncoder, images: Tensor, plan: Plan) -> dict[str, Any]:
    """`objective.encode_images` as a function: with both as arguments, what is compiled for one pair fits the next."""
    return objective.encode_images(encoder, images, plan)


def encode_captions(encoder: DualEncoder, tokens: Tensor, dense: bool) -> tuple[Tensor, Tensor]:
    """`encoder.encode_words` as a function."""
    return encoder.encode_words(tokens, dense=dense)


@cache
def compiled_plan() -> Callable[..., Plan]:
    """An objective's plan, compiled likewise: some look at every pair of an image's patches."""
    return compile_shapes(make_plan)


def make_plan(objective: Objective, encoder: DualEncoder, images: Tensor, noise: Tensor | None, ranks: Ranks) -> Plan:
    """`objective.plan` as a function."""
    return objective.plan(encoder, images, noise, ranks)


class Towers(nn.Module):
    """Both towers as an objective runs them: what DistributedDataParallel and FSDP wrap.

    The objective is no part of it. Its own parameters are few and used by the loss, where no wrapper looks.

    Args:
        settings: how to run.
        objective: what to run for.
        encoder: what is run.
        sharded: its weights are spread over ranks; then blocks are compiled one by one, as weights come and go between
            them.
        graphs: what is compiled is replayed as CUDA graphs. For one forward and one backward pass a step, unwrapped.
    """

    def __init__(
        self,
        settings: TrainSection,
        objective: Objective,
        encoder: DualEncoder,
        *,
        sharded: bool = False,
        graphs: bool = False,
    ):
        super().__init__()
        self.encoder = encoder
        self._settings, self._sharded, self._graphs = settings, sharded, graphs
        self._objective = (objective,)  # in a tuple: nn.Module would make it a part

    def forward(
        self, images: Tensor, tokens: Tensor | tuple[Tensor, ...], plan: Plan | None = None
    ) -> tuple[type, dict[str, Any]]:
        """The class of the features and its fields: wrappers look for tensors in plain containers only."""
        by_blocks = self._sharded or self._settings.compile == "blocks"
        compiled = is_compiled(self._settings, images.device) and not by_blocks
        graphs = self._graphs and torch.is_grad_enabled()
        features = run_towers(
            self._settings, self._objective[0], self.encoder, images, tokens, plan, compiled=compiled, graphs=graphs
        )
        fields = vars(features)
        if self._sharded:
            # FSDP hangs its hooks on what is returned, and they would not survive a change of what a view shows.
            fields = {k: v.clone() if isinstance(v, Tensor) and v._is_view() else v for k, v in fields.items()}
        return type(features), fields

    @torch.no_grad()
    def plan(self, images: Tensor, noise: Tensor | None, ranks: Ranks = SINGLE) -> Plan:
        """What the objective decides on before the towers run."""
        if noise is None:
            return Plan()
        device = images.device
        run = compiled_plan() if is_compiled(self._settings, device) and not self._sharded else make_plan
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16(self._settings, device)):
            return run(self._objective[0], self.encoder, images, noise, ranks)


def transformer_blocks(encoder: DualEncoder) -> list[nn.Module]:
    """The blocks of both towers, in the order in which they run."""
    clip = encoder.clip
    return [*clip.visual.transformer.resblocks, *text_tower(clip).transformer.resblocks]


def compile_blocks(encoder: DualEncoder) -> None:
    """Compile the blocks of both towers, each by itself, in place."""
    raise_limit()
    for block in transformer_blocks(encoder):
        block.compile(dynamic=False)
