"""What a rank does in the tests of distributed training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_run import tiny
from torch import Tensor

from powerclip.data.batch import Batch
from powerclip.runtime.distributed import SINGLE, Ranks, init_process_group, join_ranks
from powerclip.train.data import make_loader
from powerclip.train.loop import backward, share_terms, train, train_step
from powerclip.train.parallel import clip_gradients, full_tensors
from powerclip.train.recipe import Recipe
from powerclip.train.state import TrainState, start

# A grid of 4 × 4, so that there is something to choose from.
TOWERS = (
    "model.config.vision_cfg.image_size=32",
    "model.config.vision_cfg.width=32",
    "model.config.text_cfg.width=16",
    "train.batch_size=8",
    # Some gradients are zero but for rounding: Adam must not make an update of them.
    "optim.eps=1e-3",
)
MOSAICS = ("alignment.mosaics=1.0", "train.batch_size=16")  # two ranks, two parts, four images in a mosaic
# Every objective, and every way in which PowerCLIP's can be contrasted.
CASES: dict[str, Sequence[str]] = {
    "clip": ("objective=clip",),
    "clip_patch_dropout": ("objective=clip", "model.config.vision_cfg.patch_dropout=0.5"),
    "flip": ("objective=flip",),
    "a_clip": ("objective=a_clip", "objective_settings.hidden=32", "objective_settings.output=16"),
    "e_clip": ("objective=e_clip", "objective_settings.embedding=true"),
    "clip_pgs": ("objective=clip_pgs",),
    "filip": ("objective=filip",),
    "sparc": ("objective=sparc",),
    "powerclip": (),
    "powerclip_as_printed": ("alignment.preset=paper",),
    "powerclip_by_autograd": ("alignment.preset=paper", "alignment.gradient=autograd"),
    "powerclip_k": ("alignment.negatives=k", "alignment.k=3"),
    "powerclip_k_triplet": ("alignment.negatives=k", "alignment.k=5", "alignment.loss=triplet"),
    "powerclip_all_triplet": ("alignment.loss=triplet",),
    "powerclip_semi_hard": ("alignment.negatives=semi_hard",),
    "powerclip_semi_hard_by_autograd": ("alignment.negatives=semi_hard", "alignment.gradient=autograd"),
    "powerclip_annealed": ("alignment.negatives=k", "alignment.anneal=true"),
    "powerclip_trains_image": ("alignment.trains=image", "alignment.projection=separate", "alignment.ramp=1.0"),
    "powerclip_trains_text": ("alignment.trains=text", "alignment.negatives=hardest"),
    "powerclip_exact": ("alignment.aggregation=exact",),
    "powerclip_centred_images": ("alignment.centre=image",),
    "powerclip_single_tokens": ("alignment.parse_trees=false",),
    "powerclip_mosaics": (*MOSAICS, "alignment.mosaic_texts=both", "alignment.mosaic_sets=0.5"),
    "powerclip_mosaics_patches": (
        *(*MOSAICS, "alignment.mosaic_pool=patches", "alignment.mosaic_among=own"),
        *("alignment.mosaic_texts=alone", "alignment.projection=separate"),
    ),
}
SHARDED_RUN = ("train.sharding=full", "evaluation.scenes=true")


def look(folder: Path, ranks: Ranks, overrides: Sequence[str]) -> dict[str, Tensor]:
    """Loss, logged parts, gradients and their norm at the second step of a run, as all ranks see them."""
    recipe = tiny(folder, *TOWERS, *overrides)
    state = start(recipe, ranks)
    one, other = batches(state, recipe)
    train_step(state, one, recipe)
    state.objective.progress(state.step, recipe.train.steps)
    terms = share_terms(backward(state, other, recipe), ranks)
    found = {"loss": terms.total.detach(), **{f"logged {name}": part for name, part in terms.parts.items()}}
    found |= {f"gradient of {name}": full_tensors(p.grad).clone() for name, p in trained(state) if p.grad is not None}
    buffers = {**dict(state.objective.named_buffers()), **dict(state.objective.named_parameters())}
    found |= {name: value.detach().clone() for name, value in buffers.items() if "running" in name or "teacher" in name}
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    return {**found, "norm": clip_gradients(parameters, 0.1), "clipped norm": clip_gradients(parameters, None)}


_MADE: dict[tuple[Ranks, int], list[Batch]] = {}


def batches(state: TrainState, recipe: Recipe) -> list[Batch]:
    """The first two of a run; all cases of one batch size have the same."""
    key = (state.ranks, recipe.train.batch_size)
    if key not in _MADE:
        loader = make_loader(recipe, state.encoder, ranks=state.ranks)
        _MADE[key] = [loader.batch(0), loader.batch(1)]
    return _MADE[key]


def trained(state: TrainState) -> list[tuple[str, Any]]:
    return [*state.encoder.named_parameters(), *state.objective.named_parameters("objective")]


def look_at_cases(folder: Path, cases: Sequence[str], *overrides: str) -> dict[str, dict[str, Tensor]]:
    with join_ranks("cpu") as ranks:
        return {case: look(folder, ranks, [*CASES[case], *overrides]) for case in cases}


def run_whole(folder: Path, output: Path, stop: int | None, *overrides: str, resume: bool = False) -> dict[str, float]:
    """Train into `output`, perhaps only up to a step, and give the scores."""

    def on_step(state: TrainState) -> None:
        if state.step == stop:
            raise KeyboardInterrupt

    try:
        result = train(tiny(folder, *overrides), output, quiet=True, resume=resume, on_step=on_step)
    except KeyboardInterrupt:
        return {}
    return dict(result.results.scores)


def run_in_two_goes(folder: Path, output: Path, *overrides: str) -> None:
    with join_ranks("cpu"):
        run_whole(folder, output, 7, *overrides)
        run_whole(folder, output, None, *overrides, resume=True)


def everything(folder: Path, output: Path, cases: Sequence[str], sharded: Sequence[str]) -> dict[str, Any]:
    """All that two ranks are asked for, in one go: the first connection of a process is the slow part."""
    with join_ranks("cpu"):
        return {
            "cases": look_at_cases(folder, cases),
            "in parts": look_at_cases(folder, cases, "train.accumulate=2"),
            "sharded": look_at_cases(folder, sharded, "train.sharding=full"),
            "sharded, in parts": look_at_cases(folder, sharded, "train.sharding=full", "train.accumulate=2"),
            "scores": run_whole(folder, output / "whole", None, "evaluation.scenes=true"),
            "stopped": run_whole(folder, output / "stopped", 7),
            "two goes": run_in_two_goes(folder, output / "two goes"),
            "sharded run": run_whole(folder, output / "sharded", 7, "train.sharding=full"),
            "sharded scores": run_whole(folder, output / "short", None, "train.steps=3", *SHARDED_RUN),
        }


BF16 = ("train.precision=bf16",)
MIXED = (*BF16, "train.sharding=full", "train.mixed_precision_param=bf16", "train.mixed_precision_reduce=bf16")
STEADY = "optim.eps=1e-3"  # as in TOWERS: gradients that are zero but for rounding make no update
PARTS = (STEADY, "train.checkpoint_format=sharded")


def sharded_ways(folder: Path, output: Path, count: int) -> dict[str, Any]:
    """What sharded ranks are asked for beyond `everything`; four ranks make two groups."""
    hybrid = ("train.sharding=hybrid", "train.shard_ranks=2")
    with join_ranks("cpu"):
        found: dict[str, Any] = {"hybrid": look_at_cases(folder, ["powerclip"], *hybrid)}
        if count == 2:
            found["mixed"] = look_at_cases(folder, ["powerclip"], *MIXED)
            run_whole(folder, output / "parts", 7, "train.sharding=full", *PARTS)
        else:  # the run of two ranks goes on with four, in two groups
            run_whole(folder, output / "parts", None, *hybrid, *PARTS, resume=True)
        return found


class OneOfOne(Ranks):
    """A rank that sends its messages although it is alone: one GPU is enough to send them over nccl."""

    @property
    def alone(self) -> bool:
        return False


def look_over(folder: Path, device: str, cases: Sequence[str], *overrides: str) -> dict[str, dict[str, Tensor]]:
    """The cases on a device, through messages of a group of one."""
    ranks = OneOfOne()
    init_process_group(ranks, gpu=device == "cuda")
    settings = (f"train.device={device}", "train.precision=float32", "train.compile=never", *overrides)
    return {case: look(folder, ranks, [*CASES[case], *settings]) for case in cases}


def alone(folder: Path, case: str, *overrides: str) -> dict[str, Tensor]:
    """The same with one process."""
    return look(folder, SINGLE, [*CASES[case], *overrides])
