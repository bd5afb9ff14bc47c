"""Towers on several ranks: copies whose gradients are averaged (DDP), or weights that are sharded (FSDP2).

A checkpoint holds full tensors under the names that they always have: it does not matter how many ranks wrote it, or
whether they were sharded.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powerclip.errors import UserError
from powerclip.runtime.distributed import Ranks
from powerclip.train.finetune import is_adapted, merged
from powerclip.train.sections import TrainSection
from powerclip.train.towers import Towers, transformer_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from powerclip.encoders import DualEncoder


def check_batch(settings: TrainSection, ranks: Ranks) -> None:
    """UserError unless the batch divides into equal parts, one for each rank and each pass through the towers."""
    parts = ranks.count * settings.accumulate
    if settings.batch_size % parts:
        nearest = max(1, round(settings.batch_size / parts)) * parts
        raise UserError(
            f"train.batch_size is {settings.batch_size}, which {ranks.count} ranks × train.accumulate "
            f"{settings.accumulate} cannot share equally: make it a multiple of {parts}, such as {nearest}"
        )


def parallelize(towers: Towers, device: torch.device, ranks: Ranks, settings: TrainSection) -> nn.Module:
    """The towers as several ranks train them: sharded in place, or wrapped; themselves on a single rank."""
    if ranks.is_single:
        return towers
    if settings.sharding != "none":
        shard(towers, device, settings)
        return towers
    return replicate(towers, device)


def replicate(towers: Towers, device: torch.device) -> nn.Module:
    """The towers, their gradients averaged over ranks while the backward pass still runs."""
    from torch.nn.parallel import DistributedDataParallel

    # Buffers are the same on all ranks and need no message. torch has renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    gpu = [device] if device.type == "cuda" else None
    return DistributedDataParallel(towers, device_ids=gpu, gradient_as_bucket_view=True, **options)


def shard(towers: Towers, device: torch.device, settings: TrainSection) -> None:
    """Shard the weights of both towers over ranks, in place: each block by itself, and the rest together."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if settings.mixed_precision_param == "bf16" and not towers.bf16:
        raise UserError("train.mixed_precision_param: bf16 is for towers that compute in bf16: set train.precision too")
    dtypes = {"float32": torch.float32, "bf16": torch.bfloat16}
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes[settings.mixed_precision_param],
        reduce_dtype=dtypes[settings.mixed_precision_reduce],
    )
    mesh = device_mesh(device, settings)
    for block in transformer_blocks(towers.encoder):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # A scale is one number: nothing to shard. The plan of a batch is no activation: it keeps its precision.
    scales = {p for p in towers.parameters() if p.ndim == 0}
    fully_shard(towers, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False), ignored_params=scales)
    register_fsdp_forward_method(towers, "plan")


def device_mesh(device: torch.device, settings: TrainSection) -> DeviceMesh:
    """The ranks in a row, all of which share the weights; for hybrid sharding, groups × ranks of a group."""
    from torch.distributed.device_mesh import init_device_mesh

    count = torch.distributed.get_world_size()
    group = shard_count(settings, count)
    if settings.sharding != "hybrid":
        return init_device_mesh(device.type, (count,))
    return init_device_mesh(device.type, (count // group, group), mesh_dim_names=("replicate", "shard"))


def shard_count(settings: TrainSection, ranks: int) -> int:
    """Over how many of the ranks a weight is sharded; UserError when the groups of hybrid sharding do not fit."""
    if settings.sharding != "hybrid":
        return ranks if settings.sharding == "full" else 1
    group = settings.shard_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks % group:
        raise UserError(
            f"train.sharding: hybrid: {ranks} ranks are no whole number of groups of {group}; "
            "set train.shard_ranks to a number that divides the ranks"
        )
    return group


@contextmanager
def no_sync(towers: nn.Module) -> Iterator[None]:
    """Keep gradients on their rank until a later backward pass, which averages all of them."""
    wrapped: Any = towers
    if hasattr(wrapped, "no_sync"):  # DistributedDataParallel
        with wrapped.no_sync():
            yield
    elif hasattr(wrapped, "set_requires_gradient_sync"):  # FSDP
        wrapped.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapped.set_requires_gradient_sync(True)
    else:
        yield


def is_sharded(value: object) -> bool:
    """Whether a tensor is sharded over ranks."""
    return hasattr(value, "full_tensor")


def full_tensors(value: Any) -> Any:
    """Nested plain values with every sharded tensor gathered. All ranks must call it, and all get the result."""
    if isinstance(value, Tensor):
        sharded: Any = value
        return sharded.full_tensor() if is_sharded(value) else value
    if isinstance(value, Mapping):
        return {key: full_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(full_tensors(item) for item in value)
    return value


def shard_like(value: Tensor, pattern: Any) -> Tensor:
    """A full tensor as `pattern` has it: this rank's shard of it where that is sharded."""
    if not is_sharded(pattern):
        return value
    from torch.distributed.tensor import distribute_tensor

    # All ranks have read the same values: none has to be sent.
    return distribute_tensor(value.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None)


def load_module(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give a module, sharded or not, the values of a full state dict."""
    patterns = module.state_dict()
    parts = {name: shard_like(value, patterns.get(name)) for name, value in saved.items()}
    module.load_state_dict(parts)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimiser of sharded or full parameters the values of a full state dict."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def fit(value: Any, parameter: Tensor) -> Any:
        moment = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
        return shard_like(value, parameter) if moment else value

    state = {
        number: {name: fit(value, parameters[number]) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def full_encoder(encoder: DualEncoder) -> DualEncoder:
    """A plain copy with full weights on every rank, when the encoder is sharded or adapted; otherwise itself."""
    if is_adapted(encoder):
        return merged(encoder)
    if not any(is_sharded(p) for p in encoder.parameters()):
        return encoder
    from powerclip.encoders.models import Blueprint, assemble

    copy = assemble(Blueprint(encoder.config, "the model"))
    copy.clip.visual.preprocess_cfg = encoder.clip.visual.preprocess_cfg
    copy.directory, copy.pad_id = encoder.directory, encoder.pad_id
    copy.load_state_dict(full_tensors(encoder.state_dict()))
    return copy.to(next(encoder.parameters()).device)


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale gradients down to a norm of `limit`, and return the norm that they had; without a limit only that."""
    parameters = [p for p in parameters if p.grad is not None]
    kinds = [[p for p in parameters if is_sharded(p)], [p for p in parameters if not is_sharded(p)]]
    if not kinds[0]:
        if limit:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # No operation takes both kinds at once.
    norms = [
        full_tensors(torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in kinds
    ]
    norm = torch.stack(norms).norm()
    if limit:
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, limit, norm)
    return norm
