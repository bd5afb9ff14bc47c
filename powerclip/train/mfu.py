"""Model FLOPs utilisation (MFU): operations of the towers against the peak rate of the GPU's data sheet."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from powerclip.objectives import build_objective
from powerclip.train.finetune import prepare
from powerclip.train.precompute import input_shape
from powerclip.train.recipe import Recipe
from powerclip.train.towers import Towers

# Dense bf16 with float32 sums, 10^12 operations a second, from the data sheets. The first key that occurs as a word in
# the device's name counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A30": 165.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
}


def peak_flops(device: torch.device) -> float | None:
    """Operations a second that the device's data sheet promises in bf16; None when it is not known."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """`peak_flops` by the device's name."""
    return next((1e12 * rate for gpu, rate in PEAK_TFLOPS.items() if re.search(rf"\b{gpu}\b", name)), None)


class Mfu:
    """Model FLOPs utilisation of a run: the share of the GPUs' bf16 rate that it reaches.

    Operations of the loss, and those repeated to save memory, are not counted.
    """

    def __init__(self, recipe: Recipe, device: torch.device, gpus: int = 1):
        self._recipe, self._gpus = recipe, gpus
        self._peak = peak_flops(device)
        self._operations: dict[int, float] = {}

    def read(self, samples_per_second: float, length: int) -> dict[str, float]:
        """`mfu` at this speed, with captions padded to `length` tokens; empty where the peak rate is not known."""
        if self._peak is None:
            return {}
        if length not in self._operations:
            self._operations[length] = operations(self._recipe, length)
        return {"mfu": samples_per_second * self._operations[length] / (self._gpus * self._peak)}


def operations(recipe: Recipe, length: int) -> float:
    """Floating-point operations of the towers of a recipe for one pair, forward and, where something learns, backward.

    Adapters (`train.lora`) are left out. Counted with towers of the same structure but without weights: compiled or
    sharded ones cannot be counted.
    """
    try:
        return _operations_on(torch.device("meta"), recipe, length)
    except RuntimeError:  # the number of patches that are kept depends on the image, which meta tensors do not have
        return _operations_on(torch.device("cpu"), recipe, length)


def _operations_on(device: torch.device, recipe: Recipe, length: int, pairs: int = 2) -> float:
    from powerclip.encoders import build

    with torch.random.fork_rng([]), device:
        encoder = build(name=recipe.model.name, config=recipe.model.config).train()
        prepare(encoder, replace(recipe.train, lora=0))
        objective = build_objective(recipe.objective, recipe.alignment, recipe.objective_settings)
        objective.attach(encoder)
        images = torch.randn(pairs, *input_shape(recipe.train, encoder))
        tokens = torch.ones(pairs, length, dtype=torch.long)
        return count_operations(Towers(objective, encoder), images, tokens) / pairs


def count_operations(towers: Towers, images: Tensor, tokens: Tensor) -> float:
    """Operations of a forward pass through the towers and of the gradient of the features that it gives."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        features = tree_leaves(towers(images, tokens))
        trained = [value for value in features if isinstance(value, Tensor) and value.requires_grad]
        torch.stack([value.float().sum() for value in trained]).sum().backward()
    return float(counter.get_total_flops())
