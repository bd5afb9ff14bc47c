"""The state of a training run, all of it: what a checkpoint holds and what resuming restores."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from powerclip.encoders import DualEncoder, build
from powerclip.errors import UserError
from powerclip.objectives import Objective, build_objective
from powerclip.train.optimizer import make_optimizer
from powerclip.train.recipe import Recipe


@dataclass
class TrainState:
    """Everything that changes from step to step. The data are a function of `step` and need no state."""

    step: int  # finished updates
    device: torch.device
    encoder: DualEncoder
    objective: Objective
    optimizer: torch.optim.Optimizer

    def snapshot(self) -> dict[str, Any]:
        """Plain values and tensors that `restore` brings back."""
        cuda = self.device.type == "cuda"
        return {
            "encoder": self.encoder.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": {
                "python": random.getstate(),
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
            },
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue where `saved`, a snapshot with its step, stopped."""
        self.encoder.load_state_dict(saved["encoder"])
        self.objective.load_state_dict(saved["objective"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        random.setstate(saved["random"]["python"])
        torch.set_rng_state(saved["random"]["torch"])
        if self.device.type == "cuda" and saved["random"]["cuda"] is not None:
            torch.cuda.set_rng_state(saved["random"]["cuda"], self.device)


def start(recipe: Recipe) -> TrainState:
    """A run at step 0: weights drawn from `train.seed`, or pretrained ones."""
    device = choose_device(recipe.train.device)
    random.seed(recipe.train.seed)
    torch.manual_seed(recipe.train.seed)
    model = recipe.model
    encoder = build(name=model.name, config=model.config, pretrained=model.pretrained).to(device).train()
    objective = build_objective(recipe.objective, recipe.alignment, recipe.objective_settings)
    objective.attach(encoder)
    objective.to(device).train()
    optimizer = make_optimizer([encoder, objective], recipe.optim)
    return TrainState(0, device, encoder, objective, optimizer)


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"train.device: {name!r} is not a device; use auto, cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"train.device: {name} is not there (GPUs that torch sees: {torch.cuda.device_count()})")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device: {name!r} is not supported; use auto, cpu or cuda")
    return device
