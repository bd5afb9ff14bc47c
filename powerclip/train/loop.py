"""The training loop: one process, one device, everything that a step does on one page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from powerclip.data.batch import Batch
from powerclip.encoders import DualEncoder, load, save
from powerclip.errors import UserError
from powerclip.objectives import Terms
from powerclip.train import checkpoint
from powerclip.train.data import CorpusStore, make_loader, note_squashing
from powerclip.train.evaluation import Evaluation, describe, make_evaluation
from powerclip.train.metrics import CollapseWatch, MetricsLog, read_metrics
from powerclip.train.optimizer import learning_rate
from powerclip.train.progress import Progress, duration
from powerclip.train.recipe import Recipe
from powerclip.train.results import Results, read_results, seconds_per_step, write_results
from powerclip.train.run_folder import RunFolder
from powerclip.train.state import TrainState, start
from powerclip.train.towers import is_compiled, run_towers


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: RunFolder
    encoder: DualEncoder
    results: Results


def train(
    recipe: Recipe,
    output: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    console: Console | None = None,
    evaluate: Evaluation | None = None,
    store: CorpusStore | None = None,
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
        evaluate: what to measure instead of what `recipe.evaluation` says, at the end and every
            `train.evaluate_every` steps; its scores are logged as `evaluate/…`.
        store: corpora that other runs of this process have read.
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
    progress = Progress(folder.root.name, settings.steps, quiet=quiet, console=console)
    # What can be wrong with a recipe shows here, before anything is written.
    state = start(recipe)
    if resume and folder.finished:
        progress.say(f"{folder.root} is finished: nothing to resume")
        return finished_run(folder, state.device)
    note_squashing(recipe, state.encoder)
    store = store or CorpusStore(progress.say)
    compiled = is_compiled(settings, state.device)
    loader = make_loader(recipe, state.encoder, store=store, device=state.device, compiled=compiled)
    evaluate = evaluate or make_evaluation(recipe, state.encoder, store)
    if resume:
        saved = checkpoint.newest(folder.checkpoints, progress.warn)
        if saved is not None:
            state.restore(saved)
        progress.say(f"{folder.root} continues after step {state.step} of {settings.steps}")
    else:
        folder.begin(recipe)

    log = MetricsLog(folder.metrics, folder.tensorboard, after=state.step)
    watch = CollapseWatch()
    values: dict[str, float] | None = None
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
                if evaluate and settings.evaluate_every and step % settings.evaluate_every == 0 and not last:
                    paused = time.perf_counter()
                    log.write(step, run_evaluation(evaluate, state))
                    clock += time.perf_counter() - paused  # samples/s are those of training
                if kept:
                    checkpoint.write(folder.checkpoints, step, state.snapshot(), settings.keep)
                if on_step:
                    on_step(state)
        if settings.save_model:
            save(state.encoder.eval(), folder.model)
        scores = run_evaluation(evaluate, state) if evaluate else {}
        if scores:
            log.write(settings.steps, scores)
    finally:
        log.close()
    results = Results(
        steps=settings.steps,
        seconds=time.perf_counter() - began,
        seconds_per_step=seconds_per_step(read_metrics(folder.metrics), settings.batch_size),
        scores={name.removeprefix("evaluate/"): score for name, score in scores.items()},
        last=values or {},
    )
    write_results(folder.results, results)
    progress.say(f"{folder.root} finished after {settings.steps} steps ({duration(results.seconds)})")
    if scores:
        progress.say(f"{folder.root.name}  {describe(results.scores)}")
    return RunResult(folder, state.encoder.eval(), results)


def finished_run(folder: RunFolder, device: torch.device) -> RunResult:
    """The run that a folder holds, read back."""
    if not folder.model.is_dir():
        raise UserError(f"{folder.root} is finished and its model was not kept (train.save_model: false)")
    return RunResult(folder, load(folder.model, device=device)[0], read_results(folder.results))


def train_step(state: TrainState, batch: Batch, recipe: Recipe) -> tuple[float, Terms, Tensor]:
    """One update; gives the learning rate, the loss and the norm of its gradient. Nothing waits for the GPU."""
    steps = recipe.train.steps
    phase = state.objective.phase(state.step, steps)
    # Only the start of a run needs a warm-up.
    optim = recipe.optim if phase.start == 0 else replace(recipe.optim, warmup=0)
    rate = phase.rate * learning_rate(state.step - phase.start, phase.end - phase.start, optim)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.objective.progress(state.step, steps)
    features = run_towers(recipe.train, state.objective, state.encoder, batch.images, batch.tokens)
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
    state.objective.after_step(state.encoder)
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


def run_evaluation(evaluate: Evaluation, state: TrainState) -> dict[str, float]:
    """Scores of the model as it is, under `evaluate/…`; training goes on as if nothing had been asked."""
    with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []), torch.no_grad():
        try:
            scores = evaluate(state.encoder.eval())
        finally:
            state.encoder.train()
    return {f"evaluate/{name}": float(score) for name, score in scores.items()}
