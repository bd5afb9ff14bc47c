"""The training loop: everything that a step does on one page, for one process or for one of several ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from powerclip.data.batch import Batch
from powerclip.data.loader import BatchLoader, killed_workers, mix
from powerclip.encoders import DualEncoder, load, save
from powerclip.errors import UserError
from powerclip.evaluate.spread import spread_encoder
from powerclip.objectives import Terms
from powerclip.runtime.distributed import Ranks, choose_device, join_ranks
from powerclip.runtime.environment import note_environment
from powerclip.runtime.progress import Progress, duration
from powerclip.runtime.signals import Preempted, Signals, StopRequest
from powerclip.train import checkpoint
from powerclip.train.accumulate import backward_in_parts
from powerclip.train.checkpoint import CheckpointWriter
from powerclip.train.data import CorpusStore, make_loader, note_squashing
from powerclip.train.evaluation import Evaluation, describe, make_evaluation
from powerclip.train.guard import Guard, mark_loss, step_if_finite
from powerclip.train.inputs import check_inputs
from powerclip.train.metrics import MetricsLog, NullLogger, WandbLog, read_metrics, require_wandb
from powerclip.train.mfu import Mfu
from powerclip.train.optimizer import learning_rate
from powerclip.train.parallel import clip_gradients, full_encoder
from powerclip.train.recipe import Recipe, steps_of
from powerclip.train.results import Results, read_results, seconds_per_step, write_results
from powerclip.train.run_folder import RunFolder
from powerclip.train.state import TrainState, start
from powerclip.train.statistics import CollapseDetector, StepTimer, batch_statistics, describe_terms, memory
from powerclip.train.towers import is_compiled


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
    resume: bool | Literal["auto"] = False,
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
        resume: continue the unfinished run in `output`; a finished one is left as it is. `auto` begins a run where
            there is none, or none with a good checkpoint.
        overwrite: replace the run in `output`.
        quiet: print warnings only.
        console: where to print; standard output by default.
        evaluate: what to measure instead of what `recipe.evaluation` says, at the end and every
            `train.evaluate_every` steps; its scores are logged as `evaluate/…`.
        store: corpora that other runs of this process have read.
        on_step: called after each step.

    Raises:
        UserError: the folder holds another run, no checkpoint is good, the loss is no longer finite, a GPU is full.
        Preempted: SIGTERM asked for it; a checkpoint of the last step is written.
    """
    with explain_out_of_memory(), killed_workers(), join_ranks(recipe.train.device) as ranks:
        return run(
            recipe,
            RunFolder(Path(output)),
            ranks,
            resume=resume,
            overwrite=overwrite,
            quiet=quiet,
            console=console,
            evaluate=evaluate,
            store=store,
            on_step=on_step,
        )


def run(
    recipe: Recipe,
    folder: RunFolder,
    ranks: Ranks,
    *,
    resume: bool | Literal["auto"],
    overwrite: bool,
    quiet: bool,
    console: Console | None,
    evaluate: Evaluation | None,
    store: CorpusStore | None,
    on_step: Callable[[TrainState], None] | None,
) -> RunResult:
    """`train` on one of the ranks; the first one writes and prints."""
    began = time.perf_counter()
    settings = recipe.train
    required = resume != "auto"
    resume = ranks.broadcast(lambda: should_resume(folder, recipe, resume, overwrite))
    console = console if ranks.is_main else Console(quiet=True)
    progress = Progress(folder.root.name, settings.steps, unit="step", every=0, quiet=quiet, console=console)
    wandb = settings.wandb
    if wandb:
        require_wandb()
    # What can be wrong with a recipe shows here, before anything is written.
    ranks.raise_on_all(lambda: check_inputs(recipe))
    if resume and folder.finished:
        # Before the run is made: it may have been one for another machine.
        device = ranks.raise_on_all(lambda: choose_device(settings.device, ranks))
        progress.say(f"{folder.root} is finished: nothing to resume")
        return finished_run(folder, device)
    state = ranks.raise_on_all(lambda: start(recipe, ranks))
    note_squashing(recipe, state.encoder)
    store = store or CorpusStore(progress.say)
    compiled = is_compiled(settings, state.device)
    loader = ranks.raise_on_all(
        lambda: make_loader(
            recipe,
            state.encoder,
            store=store,
            device=state.device,
            compiled=compiled,
            ranks=ranks,
            warn=progress.warn,
        )
    )
    evaluate = evaluate or ranks.raise_on_all(lambda: make_evaluation(recipe, state.encoder, store))
    recipe = with_steps(recipe, loader)
    settings, progress.total = recipe.train, recipe.train.steps
    guard = Guard(settings.max_skipped, (state.encoder, state.objective), progress.warn)
    if resume:
        folder.check_same(recipe)
        saved = newest_state(folder, ranks, progress, required=required)
        if saved is not None:
            state.restore(saved)
            guard.restore(saved.get("guard", {}))
        progress.say(f"{folder.root} continues after step {state.step} of {settings.steps}")
    elif ranks.is_main:
        folder.begin(recipe)

    progress.skip(state.step)
    log: MetricsLog | NullLogger = NullLogger()
    writer: CheckpointWriter | NullLogger = NullLogger()
    if ranks.is_main:
        note_environment(folder.environment, state.step)
        also = [WandbLog(wandb, recipe, folder.root, resumed=state.step > 0)] if wandb else []
        log = MetricsLog(folder.metrics, folder.tensorboard, after=state.step, also=also)
        writer = CheckpointWriter(folder.checkpoints, settings.keep, progress.warn)
    mfu = Mfu(recipe, state.device, gpus=ranks.count)
    collapse = CollapseDetector()
    timer = StepTimer(state.step, settings.batch_size)
    counts: Counter[str] = Counter()  # samples skipped, trees and regions replaced, since the last logged step
    values: dict[str, float] | None = None
    try:
        with (
            progress,
            Signals(settings.checkpoint_minutes) as signals,
            closing(loader.stream(state.step, settings.steps)) as batches,
        ):
            for batch in timer.time_batches(batches):
                rate, terms, norm = train_step(state, batch.to(state.device, non_blocking=True), recipe)
                guard.watch(state.step, terms, norm)
                collapse.add(terms.parts)
                counts.update(batch.counts)
                step, last = state.step, state.step == settings.steps
                request = StopRequest(ranks.max_int(signals.request()))
                values = None
                logged = last or step % settings.log_every == 0 or step == 1
                kept = settings.checkpoint_every > 0 and step % settings.checkpoint_every == 0
                if logged:
                    values = {
                        "loss": float(terms.total.detach()),
                        **{name: float(part) for name, part in terms.parts.items()},
                        "lr": rate,
                        "logit_scale": float(state.encoder.clip.logit_scale.detach().exp()),
                        "grad_norm": float(norm),
                        "skipped": guard.skipped,
                        **timer.read(step),
                        **ranks.mean_of(batch_statistics(batch)),
                        **sum(ranks.collect(counts), Counter()),
                        **memory(state.device),
                    }
                    values |= mfu.read(values["samples_per_second"], round(batch.padded_length))
                    log.write(step, values)
                    counts.clear()
                progress.update(step, describe_terms(values) if values else None)
                if logged and (warning := collapse.warning()):
                    progress.warn(warning)
                if evaluate and settings.evaluate_every and step % settings.evaluate_every == 0 and not last:
                    with timer.pause():
                        log.write(step, run_evaluation(evaluate, state))
                if (kept or request) and not last:
                    guard.settle()
                    writer.write(step, {**state.snapshot(), "guard": guard.snapshot()})
                    signals.written()
                if request is StopRequest.STOP and not last:
                    writer.wait(needed=True)
                    raise Preempted(f"stopped after step {step} of {settings.steps}, as asked")
                if on_step:
                    on_step(state)
            guard.settle()
        encoder = full_encoder(state.encoder).eval()
        if settings.save_model and ranks.is_main:
            save(encoder, folder.model)
        scores = run_evaluation(evaluate, state) if evaluate else {}
        if scores:
            log.write(settings.steps, scores)
    finally:
        log.close()
        writer.wait()
    results = Results(
        steps=settings.steps,
        seconds=time.perf_counter() - began,
        seconds_per_step=seconds_per_step(read_metrics(folder.metrics), settings.batch_size),
        scores={name.removeprefix("evaluate/"): score for name, score in scores.items()},
        last=values or {},
    )
    if ranks.is_main:
        write_results(folder.results, results)
    progress.say(f"{folder.root} finished after {settings.steps} steps ({duration(results.seconds)})")
    if scores:
        progress.say(f"{folder.root.name}  {describe(results.scores)}")
    return RunResult(folder, encoder.eval(), results)


def with_steps(recipe: Recipe, loader: BatchLoader) -> Recipe:
    """The recipe with `train.steps` settled: where it gives epochs and no number of samples, the data are counted.

    Raises:
        UserError: the data have no end.
    """
    settings = recipe.train
    if settings.epochs is None or recipe.data.samples is not None:
        return recipe
    steps = getattr(loader, "steps_per_epoch", None)
    if steps is None:
        raise UserError(
            f"train.epochs: data.source {recipe.data.source} has no end; give train.steps, or data.samples for an epoch"
        )
    return replace(recipe, train=replace(settings, steps=steps_of(settings.epochs, steps)))


def should_resume(folder: RunFolder, recipe: Recipe, resume: bool | Literal["auto"], overwrite: bool) -> bool:
    """Whether the run in a folder is continued; UserError when it can neither be continued nor begun."""
    resume = folder.holds_run() if resume == "auto" else resume
    if resume:
        folder.check_same(recipe, counted=False)
    else:
        folder.check_free(overwrite=overwrite)
    return resume


def newest_state(folder: RunFolder, ranks: Ranks, progress: Progress, *, required: bool) -> dict[str, Any] | None:
    """The newest good checkpoint; the first rank looks for it, the others read the same."""
    looked: list[dict[str, Any] | None] = []

    def look() -> int | None:
        looked.append(checkpoint.newest(folder.checkpoints, progress.warn, required=required))
        return None if looked[0] is None else looked[0]["step"]

    step = ranks.broadcast(look)
    if step is None or ranks.is_main:
        return looked[0] if looked else None
    return checkpoint.read(checkpoint.checkpoint_path(folder.checkpoints, step))


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
    terms = share_terms(backward(state, batch, recipe), state.ranks)
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    norm = clip_gradients(parameters, recipe.optim.grad_clip)
    step_if_finite(state.optimizer, norm)
    state.encoder.clamp_logit_scale()
    state.objective.clamp()
    state.objective.after_step(state.encoder)
    state.step += 1
    return rate, terms, norm


def backward(state: TrainState, batch: Batch, recipe: Recipe) -> Terms:
    """The loss of a batch; afterwards its gradient, averaged over ranks, is that of every trained parameter."""
    # What is random in a step is a function of the seed and the step, not of what was drawn before.
    generator = torch.Generator(state.device)
    generator.manual_seed(mix(mix(recipe.train.seed, -1), state.step))  # not the loader's: it uses the step as well
    plan = state.unwrapped_towers.plan(batch.images, generator, state.ranks)
    state.optimizer.zero_grad(set_to_none=True)
    if recipe.train.accumulate == 1:
        features = state.towers(batch.images, batch.token_groups, plan)
        # The loss is outside of autocast: similarities that carry a gradient are float32.
        terms = state.objective.loss(features, batch, state.ranks)
        mark_loss(terms.total).backward()
    else:
        terms = backward_in_parts(state, batch, plan, recipe.train.accumulate)
    state.ranks.average_gradients(state.unwrapped_parameters)
    return terms


def share_terms(terms: Terms, ranks: Ranks) -> Terms:
    """The terms of the whole batch, from those of each rank."""
    if ranks.is_single:
        return terms
    values = torch.stack([terms.total.detach(), *(part.to(terms.total.dtype) for part in terms.parts.values())])
    total, *parts = ranks.mean(values).unbind()
    return Terms(total, dict(zip(terms.parts, parts, strict=True)))


def run_evaluation(evaluate: Evaluation, state: TrainState) -> dict[str, float]:
    """Scores of the model as it is, under `evaluate/…`; training goes on as if nothing had been asked.

    All ranks ask, and each embeds its share.
    """
    with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []), torch.no_grad():
        try:
            scores = evaluate(spread_encoder(full_encoder(state.encoder), state.ranks).eval())
        finally:
            state.encoder.train()
    return {f"evaluate/{name}": float(score) for name, score in scores.items()}


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of a GPU into a UserError that says which settings help."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            "the GPU's memory ran out: lower train.batch_size, or keep the batch with train.accumulate=4, "
            "train.checkpoint_activations=true or, on several GPUs, train.sharding=full"
        ) from None
