"""The state of a training run, all of it: what a checkpoint holds and what resuming restores."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powerclip.alignment.backends import choose_backend
from powerclip.data.loader import DRAWS_VERSION
from powerclip.encoders import DualEncoder, build
from powerclip.encoders.fp8 import use_fp8
from powerclip.encoders.self_attention import use_packed_attention
from powerclip.errors import UserError
from powerclip.objectives import Objective, build_objective
from powerclip.objectives.mosaics import check_rows
from powerclip.runtime.distributed import SINGLE, Ranks, choose_device
from powerclip.train.finetune import adapter_state, is_adapted, load_adapted, merged, prepare, rates, redraw, train_mode
from powerclip.train.optimizer import make_optimizer
from powerclip.train.parallel import check_batch, full_tensors, is_sharded, load_module, load_optimizer, parallelize
from powerclip.train.precompute import check_precompute
from powerclip.train.recipe import Recipe
from powerclip.train.sections import parse_redraw
from powerclip.train.sharded_checkpoint import load_parts
from powerclip.train.towers import Towers, make_towers, transformer_blocks


@dataclass
class TrainState:
    """Everything that changes from step to step. The data and what is drawn are functions of `step`: no state."""

    step: int  # finished updates
    device: torch.device
    encoder: DualEncoder
    objective: Objective
    optimizer: torch.optim.Optimizer
    unwrapped_towers: Towers  # the encoder as the objective runs it
    towers: nn.Module  # the same, wrapped so that gradients are averaged over ranks
    ranks: Ranks = SINGLE

    @property
    def unwrapped_parameters(self) -> list[Tensor]:
        """The parameters whose gradients no wrapper averages over ranks."""
        trained: list[Tensor] = [p for p in self.objective.parameters() if p.requires_grad]
        if any(is_sharded(p) for p in self.encoder.parameters()):
            trained += [p for p in self.encoder.parameters() if p.requires_grad and not is_sharded(p)]
        return trained

    def snapshot(self, *, sharded: bool = False) -> dict[str, Any]:
        """Plain values and tensors that `restore` brings back, on any number of ranks. All of them must call it.

        A `sharded` one leaves out what `sharded_checkpoint` writes rank by rank: the encoder, and AdamW's moments.
        """
        cuda = self.device.type == "cuda"
        # No step draws from these: they are saved for custom objectives, which may.
        generators = {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
        }
        adapters = adapter_state(self.encoder)
        # The weights of a checkpoint have train.lora's adapters added, so that it is a model by itself.
        encoder = merged(self.encoder) if adapters else self.encoder
        parts = {"encoder": encoder.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {
            **({} if sharded else full_tensors(parts)),
            "model": {"config": self.encoder.config, "preprocess": self.encoder.preprocess},
            "adapters": adapters,
            "objective": self.objective.state_dict(),
            "random": self.ranks.collect(generators),
            "draws": DRAWS_VERSION,
        }

    def restore(self, saved: Mapping[str, Any], parts: Path | None = None) -> None:
        """Continue where `saved`, a snapshot with its step, stopped; `parts` is the folder of a sharded one."""
        if parts is not None:
            load_parts(parts, self.encoder, self.optimizer, self.ranks)
        else:
            if is_adapted(self.encoder):
                load_adapted(self.encoder, saved["encoder"], saved["adapters"])
            else:
                load_module(self.encoder, saved["encoder"])
            load_optimizer(self.optimizer, saved["optimizer"])
        self.objective.load_state_dict(saved["objective"])
        self.step = saved["step"]
        if len(saved["random"]) != self.ranks.count:
            return
        generators = saved["random"][self.ranks.rank]
        random.setstate(generators["python"])
        torch.set_rng_state(generators["torch"])
        if self.device.type == "cuda" and generators["cuda"] is not None:
            torch.cuda.set_rng_state(generators["cuda"], self.device)


def start(recipe: Recipe, ranks: Ranks = SINGLE) -> TrainState:
    """A run at step 0: weights drawn from `train.seed`, or pretrained ones. UserError when it cannot run here."""
    settings, model = recipe.train, recipe.model
    check_batch(settings, ranks)
    if recipe.objective == "powerclip" and recipe.alignment.mosaics:
        check_rows(recipe.alignment, settings.batch_size, ranks.count * settings.accumulate)
    device = choose_device(settings.device, ranks)
    check_backend(recipe, device)
    random.seed(settings.seed)
    torch.manual_seed(settings.seed % 2**63)  # seeds of any size, as everywhere
    encoder = build(name=model.name, config=model.config, pretrained=model.pretrained)
    if model.redraw is not None:
        torch.manual_seed(settings.seed % 2**63)  # what the same towers draw that start from nothing
        redraw(encoder, build(config=recipe.with_towers(encoder.config).model.config), parse_redraw(model.redraw))
    encoder = encoder.to(device)
    use_packed_attention(encoder)
    if settings.checkpoint_activations:
        encoder.clip.set_grad_checkpointing(True)
    if encoder.clip.logit_bias is not None:
        # Only a sigmoid loss uses it: it gets no gradient here, and DDP would wait for one.
        encoder.clip.logit_bias.requires_grad_(False)
    prepare(encoder, settings)
    if settings.precision == "fp8":
        use_fp8(transformer_blocks(encoder), device)
    train_mode(encoder)
    objective = build_objective(recipe.objective, recipe.alignment, recipe.objective_settings)
    objective.attach(encoder)
    objective.to(device).train()
    if settings.precompute:
        check_precompute(encoder, objective)
    unwrapped = make_towers(settings, objective, encoder, device, ranks)
    towers = parallelize(unwrapped, device, ranks, settings)
    optimizer = make_optimizer([encoder, objective], recipe.optim, rates(encoder, settings.layer_decay))
    return TrainState(0, device, encoder, objective, optimizer, unwrapped, towers, ranks)


def check_backend(recipe: Recipe, device: torch.device) -> None:
    """UserError when the alignment is to be scored by a backend that cannot do it on this device."""
    if recipe.objective != "powerclip":
        return
    try:
        choose_backend(recipe.alignment, device)
    except ValueError as error:
        raise UserError(str(error)) from None
