"""Which parameters of pretrained towers are trained, and how fast: freezing, rates by depth, low-rank adapters.

A tower is its embeddings, its blocks and its head, the final norm with the projection into the shared space. What is
frozen has no gradient and no state in the optimiser. Frozen parts lie at the bottom of a tower, so autograd builds no
graph for them: they cost a forward pass and keep nothing.

Lee et al., "Locked-image Tuning" (LiT), CVPR 2022: a frozen image tower. Bao et al., BEiT, ICLR 2022: rates that fall
layer by layer. Hu et al., LoRA, ICLR 2022: the update of a matrix as a product of two thin ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from powerclip.encoders.text import text_blocks, text_tower
from powerclip.encoders.vision import image_blocks
from powerclip.errors import UserError
from powerclip.train.sections import TOWERS, TrainSection, parse_freeze

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

# What comes after the blocks: final norms, poolings, projections.
HEADS = frozenset({"ln_post", "ln_final", "norm", "fc_norm", "attn_pool", "pooler", "head", "proj", "text_projection"})
PROJECTIONS = frozenset({"proj", "text_projection", "head"})

# In the state dict of an adapted encoder: what belongs to an adapted weight, and the weight without its adapter.
ADAPTED, BASE = ".parametrizations.", ".original"


@dataclass
class Tower:
    """The parameters of a tower by their depth."""

    embeddings: list[nn.Parameter] = field(default_factory=list)
    blocks: list[nn.Module] = field(default_factory=list)
    head: list[nn.Parameter] = field(default_factory=list)
    projection: list[nn.Parameter] = field(default_factory=list)  # that of the head which the shared space begins with


def towers_of(encoder: DualEncoder) -> dict[str, Tower]:
    """Both towers of an encoder, under the names that `train.freeze` has for them."""
    clip = encoder.clip
    return {
        "image": _tower(clip.visual.named_parameters(), image_blocks(clip.visual)),
        "text": _tower(text_tower(clip).named_parameters(), text_blocks(clip)),
    }


def _tower(parameters: Iterable[tuple[str, nn.Parameter]], blocks: Sequence[nn.Module]) -> Tower:
    tower = Tower(blocks=list(blocks))
    of_blocks = {p for block in blocks for p in block.parameters()}
    for name, parameter in parameters:
        # open_clip's CLIP is its own text tower, and holds the image tower and the scales too.
        if parameter in of_blocks or name.startswith(("visual.", "logit_")):
            continue
        part = name.removeprefix("trunk.").removeprefix("transformer.").split(".")[0]
        (tower.head if part in HEADS else tower.embeddings).append(parameter)
        if part in PROJECTIONS:
            tower.projection.append(parameter)
    return tower


def redraw(encoder: DualEncoder, fresh: DualEncoder, parts: Sequence[str]) -> None:
    """Give an encoder the weights of a fresh one: in the towers that `parts` name, and in both projections for `heads`.

    So one folder of pretrained towers starts a run with both, with either, and, as what they are compared with, none.
    """
    old, new = towers_of(encoder), towers_of(fresh)
    with torch.no_grad():
        for name in TOWERS:
            kept = _parameters(old[name]) if name in parts else old[name].projection if "heads" in parts else ()
            drawn = _parameters(new[name]) if name in parts else new[name].projection if "heads" in parts else ()
            for parameter, value in zip(kept, drawn, strict=True):
                parameter.copy_(value)


def prepare(encoder: DualEncoder, settings: TrainSection) -> None:
    """Freeze what `settings` say, and put adapters on the rest if they ask for them.

    Raises:
        UserError: a tower has fewer blocks, or nothing is left to train.
    """
    frozen = parse_freeze(settings.freeze)
    if not frozen and not settings.lora:
        return
    towers = towers_of(encoder)
    for name, depth in frozen.items():
        freeze(towers[name], name, depth)
    if settings.precompute:
        depth = frozen["image"]
        encoder.blocks_before = len(towers["image"].blocks) if depth is None else depth
    if settings.lora:
        add_adapters(encoder, towers, settings)
    if not any(p.requires_grad for tower in towers.values() for p in _parameters(tower)):
        raise UserError(
            f"train.freeze: {settings.freeze} leaves no tower to train; {TOWERS[0]}:N freezes N blocks only"
        )


def train_mode(encoder: nn.Module) -> None:
    """Set an encoder to training, but not what is frozen: a text tower of Hugging Face drops a tenth of its states."""
    encoder.train()
    for module in encoder.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def freeze(tower: Tower, name: str, depth: int | None) -> None:
    """Freeze the embeddings and the first `depth` blocks of a tower; without a depth all of it."""
    if depth is not None and depth > len(tower.blocks):
        raise UserError(f"train.freeze: {name}:{depth}, but the {name} tower has {len(tower.blocks)} blocks")
    for block in tower.blocks[:depth]:
        block.requires_grad_(False)
    for parameter in [*tower.embeddings, *(tower.head if depth is None else ())]:
        parameter.requires_grad_(False)


def _parameters(tower: Tower) -> Iterator[nn.Parameter]:
    yield from tower.embeddings
    for block in tower.blocks:
        yield from block.parameters()
    yield from tower.head


def rates(encoder: DualEncoder, decay: float) -> dict[nn.Parameter, float]:
    """What a parameter's learning rate is multiplied with: 1 for heads and scales, less for each layer below them."""
    if decay == 1:
        return {}
    factors: dict[nn.Parameter, float] = {}
    for tower in towers_of(encoder).values():
        depth = len(tower.blocks)
        factors |= dict.fromkeys(tower.embeddings, decay ** (depth + 1))
        for number, block in enumerate(tower.blocks):
            factors |= dict.fromkeys(block.parameters(), decay ** (depth - number))
    return factors


# ---- adapters --------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """An adapter: a matrix [out, in] plus the product of two thin ones, which is zero at the start.

    It is a parametrization of the weight, not a layer around the layer: whatever reads the weight, packed attention and
    a compiler included, reads the sum. (peft's adapter of an attention layer adds and subtracts the product in every
    pass instead: the weights that should stay fixed drift by rounding, and it cannot be compiled.)
    """

    def __init__(self, weight: Tensor, rank: int, scale: float):
        super().__init__()
        self.scale = scale
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        self.down = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)  # as in LoRA's own code

    def forward(self, weight: Tensor) -> Tensor:
        """The adapted weight."""
        return weight + self.scale * (self.up @ self.down)


def add_adapters(encoder: DualEncoder, towers: Mapping[str, Tower], settings: TrainSection) -> None:
    """Put adapters on the matrices of all blocks that are not frozen; of the rest, projections and scales are trained.

    A projection may be new, where the towers were trained apart, and is no larger than a few adapters.
    """
    blocks = [block for tower in towers.values() for block in tower.blocks if _is_trained(block)]
    kept = [p for tower in towers.values() for p in tower.projection if p.requires_grad]
    kept += [p for p in encoder.parameters() if p.ndim == 0 and p.requires_grad]
    encoder.requires_grad_(False)
    for block in blocks:
        matrices = [
            (module, name)
            for module in block.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 2
        ]
        for module, name in matrices:
            adapter = LowRank(getattr(module, name), settings.lora, settings.lora_scale)
            parametrize.register_parametrization(module, name, adapter)
    for parameter in kept:
        parameter.requires_grad_(True)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def is_adapted(encoder: nn.Module) -> bool:
    """Whether an encoder has adapters."""
    return any(isinstance(module, LowRank) for module in encoder.modules())


def merged(encoder: DualEncoder) -> DualEncoder:
    """A plain copy of an encoder, its adapters added to the weights that they change: what is saved and measured."""
    plain = copy.deepcopy(encoder)
    for module in [module for module in plain.modules() if parametrize.is_parametrized(module)]:
        adapted: Any = module
        # torch made a class for the module, which the copy shares: removing its properties would take them from both.
        kind = type(module)
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        adapted.__class__ = type(kind.__name__, kind.__bases__, own)
        for name in list(adapted.parametrizations):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return plain.requires_grad_(True)


def adapter_state(encoder: DualEncoder) -> dict[str, Tensor]:
    """The adapters alone, by name."""
    return {name: value for name, value in encoder.state_dict().items() if ADAPTED in name and BASE not in name}


def load_adapted(encoder: DualEncoder, plain: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> None:
    """Restore an encoder with adapters from its merged state and the adapters.

    What adapters change stays as it is: it is frozen, and the run began with it.
    """
    state = encoder.state_dict()
    restored = {name: value if ADAPTED in name else plain[name] for name, value in state.items()}
    encoder.load_state_dict({**restored, **adapters})
