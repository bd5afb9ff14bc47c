"""Weights, gradients and the optimiser's state in parts, one on each rank (FSDP2), and whole again where they are read.

A checkpoint holds whole tensors under the names that they always have: it does not matter how many ranks wrote it, or
whether they were sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powerclip.train.towers import Towers, transformer_blocks

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder


def shard(towers: Towers, device: torch.device) -> None:
    """Spread the weights of both towers over all ranks, in place: each block by itself, and the rest together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in transformer_blocks(towers.encoder):
        fully_shard(block, mesh=mesh)
    # A scale is one number: nothing to share out.
    fully_shard(towers, mesh=mesh, ignored_params={p for p in towers.parameters() if p.ndim == 0})
    register_fsdp_forward_method(towers, "plan")


def is_sharded(value: object) -> bool:
    """Whether a tensor is one of those that are spread over ranks."""
    return hasattr(value, "full_tensor")


def whole(value: Any) -> Any:
    """Nested plain values with every sharded tensor put together. All ranks must ask, and all get it."""
    if isinstance(value, Tensor):
        sharded: Any = value
        return sharded.full_tensor() if is_sharded(value) else value
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(item) for item in value)
    return value


def part_like(value: Tensor, pattern: Any) -> Tensor:
    """A whole tensor as `pattern` has it: this rank's part of it where that is sharded."""
    if not is_sharded(pattern):
        return value
    from torch.distributed.tensor import distribute_tensor

    # All ranks have read the same values: none has to be sent.
    return distribute_tensor(value.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None)


def load_module(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give a module, sharded or not, the values of a whole state dict."""
    patterns = module.state_dict()
    parts = {name: part_like(value, patterns.get(name)) for name, value in saved.items()}
    module.load_state_dict(parts)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimiser of sharded or whole parameters the values of a whole state dict."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def fit(value: Any, parameter: Tensor) -> Any:
        moment = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
        return part_like(value, parameter) if moment else value

    state = {
        number: {name: fit(value, parameters[number]) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def whole_encoder(encoder: DualEncoder) -> DualEncoder:
    """A copy that is whole on every rank, when the encoder is sharded; otherwise the encoder itself."""
    if not any(is_sharded(p) for p in encoder.parameters()):
        return encoder
    from powerclip.encoders.models import Blueprint, assemble

    copy = assemble(Blueprint(encoder.config, "the model"))
    copy.clip.visual.preprocess_cfg = encoder.clip.visual.preprocess_cfg
    copy.load_state_dict(whole(encoder.state_dict()))
    return copy.to(next(encoder.parameters()).device)


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale gradients down to a norm of `limit`, and return the norm that they had; without a limit only that."""
    parameters = [p for p in parameters if p.grad is not None]
    kinds = [[p for p in parameters if is_sharded(p)], [p for p in parameters if not is_sharded(p)]]
    if not kinds[0]:
        return torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)
    # No operation takes both kinds at once.
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in kinds]
    norm = torch.stack(norms).norm()
    if limit:
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, limit, norm)
    return norm
