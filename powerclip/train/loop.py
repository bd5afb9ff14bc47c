"""The training loop: one process, one device, everything that a step does on one page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from powerclip.data.batch import Batch
from powerclip.data.loader import SceneLoader
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, load, save, tokenizer_for
from powerclip.errors import UserError
from powerclip.objectives import Terms
from powerclip.train import checkpoint
from powerclip.train.metrics import CollapseWatch, MetricsLog
from powerclip.train.optimizer import learning_rate
from powerclip.train.progress import Progress, duration
from powerclip.train.recipe import Recipe
from powerclip.train.run_folder import RunFolder
from powerclip.train.state import TrainState, start


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: RunFolder
    encoder: DualEncoder
    seconds: float  # spent in this process; a resumed run has spent more


def train(
    recipe: Recipe,
    output: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    console: Console | None = None,
    evaluate: Callable[[DualEncoder], Mapping[str, float]] | None = None,
    on_step: Callable[[TrainState], None] | None = None,
) -> RunResult:
    """Run a recipe from its first step, or from its newest good checkpoint, to its last.

    Args:
        recipe: what to run.
        output: the run folder.
        resume: continue the unfinished run in `output`; a finished one is left as it is.
        overwrite: replace the run in `output`.
        quiet: print warnings only.
        console: where to print; standard output by default.
        evaluate: called every `train.evaluate_every` steps; its scores are logged as `evaluate/…`.
        on_step: called after each step.

    Raises:
        UserError: the folder holds another run, no checkpoint is good, or the loss is no longer finite.
    """
    began = time.perf_counter()
    settings = recipe.train
    folder = RunFolder(Path(output))
    if resume:
        folder.check_same(recipe)
    else:
        folder.check_free(overwrite=overwrite)
    # What can be wrong with a recipe shows here, before anything is written.
    state = start(recipe)
    loader = make_loader(recipe, state.encoder)
    progress = Progress(folder.root.name, settings.steps, quiet=quiet, console=console)
    if resume:
        if folder.finished:
            progress.say(f"{folder.root} is finished: nothing to resume")
            return RunResult(folder, load(folder.model, device=state.device)[0], time.perf_counter() - began)
        saved = checkpoint.newest(folder.checkpoints, progress.warn)
        if saved is not None:
            state.restore(saved)
        progress.say(f"{folder.root} continues after step {state.step} of {settings.steps}")
    else:
        folder.begin(recipe)

    log = MetricsLog(folder.metrics, folder.tensorboard, after=state.step)
    watch = CollapseWatch()
    clock, clock_step = time.perf_counter(), state.step
    try:
        with progress.after(state.step), closing(loader.stream(state.step, settings.steps)) as batches:
            for batch in batches:
                rate, terms, norm = train_step(state, batch.to(state.device, non_blocking=True), recipe)
                watch.add(terms.parts)
                step, last = state.step, state.step == settings.steps
                values = None
                logged = last or step % settings.log_every == 0 or step == 1
                kept = settings.checkpoint_every > 0 and step % settings.checkpoint_every == 0 and not last
                if logged or kept or state.device.type == "cpu":  # elsewhere reading the loss waits for the GPU
                    check_finite(step, terms, norm)
                if logged:
                    now = time.perf_counter()
                    values = {
                        "loss": float(terms.total.detach()),
                        **{name: float(part) for name, part in terms.parts.items()},
                        "lr": rate,
                        "logit_scale": float(state.encoder.clip.logit_scale.detach().exp()),
                        "grad_norm": float(norm),
                        "samples_per_second": (step - clock_step) * settings.batch_size / (now - clock),
                    }
                    clock, clock_step = now, step
                    log.write(step, values)
                progress.update(step, values)
                if logged and (warning := watch.warning()):
                    progress.warn(warning)
                if evaluate and settings.evaluate_every and (last or step % settings.evaluate_every == 0):
                    paused = time.perf_counter()
                    log.write(step, run_evaluation(evaluate, state))
                    clock += time.perf_counter() - paused  # samples/s are those of training
                if kept:
                    checkpoint.write(folder.checkpoints, step, state.snapshot(), settings.keep)
                if on_step:
                    on_step(state)
    finally:
        log.close()
    save(state.encoder.eval(), folder.model)
    seconds = time.perf_counter() - began
    progress.say(f"{folder.model} finished after {settings.steps} steps ({duration(seconds)})")
    return RunResult(folder, state.encoder, seconds)


def train_step(state: TrainState, batch: Batch, recipe: Recipe) -> tuple[float, Terms, Tensor]:
    """One update; gives the learning rate, the loss and the norm of its gradient. Nothing waits for the GPU."""
    rate = learning_rate(state.step, recipe.train.steps, recipe.optim)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(state.device.type, torch.bfloat16, enabled=recipe.train.precision == "bf16"):
        features = state.objective.encode(state.encoder, batch)
    # Outside of autocast: similarities that carry a gradient are float32.
    terms = state.objective.loss(features, batch)
    state.optimizer.zero_grad(set_to_none=True)
    terms.total.backward()
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    # Without a limit the call only measures.
    norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.optim.grad_clip or math.inf)
    state.optimizer.step()
    state.encoder.clamp_logit_scale()
    state.objective.clamp()
    state.step += 1
    return rate, terms, norm


def check_finite(step: int, terms: Terms, norm: Tensor) -> None:
    """UserError when the loss or its gradient is NaN or infinite.

    What is not finite stays so, through AdamW's moments: looking only now and then misses nothing, and looking
    before each checkpoint keeps those good.
    """
    loss = float(terms.total.detach())
    if math.isfinite(loss) and math.isfinite(float(norm)):
        return
    parts = ", ".join(f"{name} {float(part):g}" for name, part in terms.parts.items())
    raise UserError(
        f"training diverged at step {step}: loss {loss:g}, gradient norm {float(norm):g} ({parts}). "
        "Try a smaller optim.lr, a longer optim.warmup or optim.grad_clip=1"
    )


def run_evaluation(evaluate: Callable[[DualEncoder], Mapping[str, float]], state: TrainState) -> dict[str, float]:
    """Scores of the model as it is, under `evaluate/…`; training goes on as if nothing had been asked."""
    with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []), torch.no_grad():
        try:
            scores = evaluate(state.encoder.eval())
        finally:
            state.encoder.train()
    return {f"evaluate/{name}": float(score) for name, score in scores.items()}


def make_loader(recipe: Recipe, encoder: DualEncoder) -> SceneLoader:
    """The batches that a recipe describes, in the form that an encoder reads."""
    pixels = encoder.clip.visual.preprocess_cfg
    return SceneLoader(
        tokenizer=CaptionTokenizer(tokenizer_for(encoder)),
        image_size=encoder.image_size,
        grid=encoder.grid,
        batch_size=recipe.train.batch_size,
        regions=recipe.regions.count,
        nodes=recipe.nodes,
        seed=recipe.data.seed,
        region_seed=recipe.train.seed,
        workers=recipe.data.workers,
        mean=pixels["mean"],
        std=pixels["std"],
    )
