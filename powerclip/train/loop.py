"""The training loop: everything that a step does on one page, for one process or for one of several ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from powerclip.data.batch import Batch
from powerclip.data.keyed_random import key_of
from powerclip.data.loader import DRAWS_VERSION, BatchLoader, killed_workers
from powerclip.encoders import DualEncoder, load, save, tokenizer_for
from powerclip.errors import UserError
from powerclip.objectives import Terms
from powerclip.runtime.distributed import Ranks, choose_device, join_ranks
from powerclip.runtime.environment import note_environment
from powerclip.runtime.locks import FolderLock
from powerclip.runtime.progress import Progress, duration
from powerclip.runtime.signals import Preempted, Signals, StopRequest
from powerclip.train import sharded_checkpoint
from powerclip.train.accumulate import backward_in_parts
from powerclip.train.checkpoint import CheckpointWriter
from powerclip.train.data import make_loader, note_squashing
from powerclip.train.data_cache import DataCache
from powerclip.train.evaluation import Evaluation, describe, make_evaluation
from powerclip.train.finetune import train_mode
from powerclip.train.guard import Guard, mark_loss, step_if_finite
from powerclip.train.inputs import check_inputs
from powerclip.train.memory import check_fits
from powerclip.train.metrics import MetricsLog, NullLogger, WandbLog, read_metrics, require_wandb
from powerclip.train.mfu import Mfu
from powerclip.train.optimizer import learning_rate, set_rate
from powerclip.train.parallel import clip_gradients, full_encoder
from powerclip.train.recipe import Recipe, check_warmup, steps_of
from powerclip.train.results import Results, read_results, seconds_per_step, write_results
from powerclip.train.run_folder import RunFolder
from powerclip.train.sharded_checkpoint import newest_state
from powerclip.train.state import TrainState, start
from powerclip.train.statistics import CollapseDetector, StepTimer, batch_statistics, describe_terms, memory


@dataclass(frozen=True)
class RunOptions:
    """How a recipe is run, where that does not change what is computed; see `train`."""

    resume: bool | Literal["auto"] = False
    overwrite: bool = False
    quiet: bool = False
    console: Console | None = None
    evaluate: Evaluation | None = None
    cache: DataCache | None = None
    on_step: Callable[[TrainState], None] | None = None


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
    cache: DataCache | None = None,
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
        cache: corpora that other runs of this process have read.
        on_step: called after each step.

    Raises:
        UserError: the folder holds another run, no checkpoint is good, the loss is no longer finite, a GPU is full.
        Preempted: SIGTERM was received; a checkpoint of the last step is written.
    """
    options = RunOptions(resume, overwrite, quiet, console, evaluate, cache, on_step)
    with explain_out_of_memory(), killed_workers(), join_ranks(recipe.train.device) as ranks:
        return run(recipe, RunFolder(Path(output)), ranks, options)


def run(recipe: Recipe, folder: RunFolder, ranks: Ranks, options: RunOptions) -> RunResult:
    """`train` on one of the ranks; the main one writes and prints, and keeps other processes out of the folder."""
    console = options.console if ranks.is_main else Console(quiet=True)
    progress = Progress(
        folder.root.name, recipe.train.steps, unit="step", every=0, quiet=options.quiet, console=console
    )
    locks: list[FolderLock] = []  # the main rank's
    ranks.broadcast(lambda: locks.append(folder.lock(progress.warn)))
    with locks[0] if locks else nullcontext():
        return run_locked(recipe, folder, ranks, options, progress)


def run_locked(recipe: Recipe, folder: RunFolder, ranks: Ranks, options: RunOptions, progress: Progress) -> RunResult:
    """The run in a folder that no other process works in."""
    resume = ranks.broadcast(lambda: folder.should_resume(recipe, options.resume, overwrite=options.overwrite))
    if recipe.train.wandb:
        require_wandb()
    # A recipe whose files are missing fails here, before anything is written.
    ranks.raise_on_all(lambda: check_inputs(recipe))
    if resume and folder.finished:
        # Before the towers are built: this machine may not be able to train them.
        device = ranks.raise_on_all(lambda: choose_device(recipe.train.device, ranks))
        progress.say(f"{folder.root} is finished: nothing to resume")
        return finished_run(folder, device)
    return Trainer(recipe, folder, ranks, options, progress, resume=resume).run()


class Trainer:
    """One run on one of the ranks: all that lives from its first step to its last."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        ranks: Ranks,
        options: RunOptions,
        progress: Progress,
        *,
        resume: bool,
    ):
        self.began = time.perf_counter()
        self.folder, self.ranks, self.options, self.progress = folder, ranks, options, progress
        self.state = state = ranks.raise_on_all(lambda: start(recipe, ranks))
        ranks.raise_on_all(lambda: check_fits(recipe, state))
        note_squashing(recipe, state.encoder)
        cache = options.cache or DataCache(progress.say)
        self.loader = ranks.raise_on_all(
            lambda: make_loader(
                recipe,
                state.encoder,
                cache=cache,
                device=state.device,
                compiled=state.unwrapped_towers.compile_mode != "none",
                ranks=ranks,
                warn=progress.warn,
            )
        )
        self.evaluate = options.evaluate or make_evaluation(recipe, state.encoder, cache, ranks, progress.warn)
        self.recipe = recipe = with_steps(recipe, self.loader)
        progress.total = recipe.train.steps
        self.guard = Guard(recipe.train.max_skipped, (state.encoder, state.objective), progress.warn)
        if resume:
            self.restore()
        elif ranks.is_main:
            folder.begin(recipe)
        progress.skip(state.step)
        self.timer = StepTimer(state.step, recipe.train.batch_size)
        self.mfu = Mfu(recipe.with_towers(state.encoder.config), state.device, gpus=ranks.count)
        self.collapse = CollapseDetector()
        self.counts: Counter[str] = Counter()  # samples skipped, trees and regions replaced, since the last logged step
        self.log: MetricsLog | NullLogger = NullLogger()
        self.writer: CheckpointWriter | NullLogger = NullLogger()
        if ranks.is_main:
            self.open_files()

    def restore(self) -> None:
        """Continue from the newest good checkpoint, or from the first step where there is none."""
        self.folder.check_same(self.recipe)
        required = self.options.resume != "auto"
        saved, parts = newest_state(self.folder.checkpoints, self.progress.warn, self.ranks, required=required)
        if saved is not None:
            self.state.restore(saved, parts)
            if saved.get("draws", 1) != DRAWS_VERSION:
                self.progress.warn(
                    f"{self.folder.root} was begun with a version of powerclip that drew the order of samples, crops "
                    "and regions differently: what follows is not what it would have computed"
                )
            self.guard.restore(saved.get("guard", {}))
        total = self.recipe.train.steps
        self.progress.say(f"{self.folder.root} continues after step {self.state.step} of {total}")

    def open_files(self) -> None:
        """Begin to write: the environment, the log and checkpoints."""
        folder, settings, step = self.folder, self.recipe.train, self.state.step
        note_environment(folder.environment, step)
        also = [WandbLog(settings.wandb, self.recipe, folder.root, resumed=step > 0)] if settings.wandb else []
        self.log = MetricsLog(folder.metrics, folder.tensorboard, after=step, also=also)
        self.writer = CheckpointWriter(folder.checkpoints, settings.keep, self.progress.warn)

    def run(self) -> RunResult:
        """Take all steps, then save and evaluate the model."""
        state, settings, folder = self.state, self.recipe.train, self.folder
        try:
            last = self.take_steps()
            encoder = full_encoder(state.encoder).eval()
            if settings.save_model and self.ranks.is_main:
                save(encoder, folder.model, tokenizer_for(encoder))
            scores = run_evaluation(self.evaluate, state) if self.evaluate else {}
            if scores:
                self.log.write(settings.steps, scores)
        finally:
            self.log.close()
            self.writer.wait()
        results = Results(
            steps=settings.steps,
            seconds=time.perf_counter() - self.began,
            seconds_per_step=seconds_per_step(read_metrics(folder.metrics), settings.batch_size),
            scores={name.removeprefix("evaluate/"): score for name, score in scores.items()},
            last=last,
        )
        if self.ranks.is_main:
            write_results(folder.results, results)
        self.progress.say(f"{folder.root} finished after {settings.steps} steps ({duration(results.seconds)})")
        if scores:
            self.progress.say(f"{folder.root.name}  {describe(results.scores)}")
        return RunResult(folder, encoder.eval(), results)

    def take_steps(self) -> dict[str, float]:
        """The loop. Gives what was logged at the last step."""
        state, settings, evaluate = self.state, self.recipe.train, self.evaluate
        values: dict[str, float] = {}
        with (
            self.progress,
            Signals(settings.checkpoint_minutes) as signals,
            closing(self.loader.stream(state.step, settings.steps)) as batches,
        ):
            for batch in self.timer.time_batches(batches):
                rate, terms, norm = train_step(state, batch.to(state.device, non_blocking=True), self.recipe)
                step, last = state.step, state.step == settings.steps
                self.guard.check(step, terms, norm)
                self.collapse.add(terms.parts)
                self.counts.update(batch.counts)
                request = StopRequest(self.ranks.max_int(signals.request()))
                self.progress.update(step)
                if last or step == 1 or step % settings.log_every == 0:
                    values = self.log_step(batch, rate, terms, norm)
                if evaluate and settings.evaluate_every and step % settings.evaluate_every == 0 and not last:
                    with self.timer.pause():
                        self.log.write(step, run_evaluation(evaluate, state))
                due = settings.checkpoint_every > 0 and step % settings.checkpoint_every == 0
                if (due or request) and not last:
                    self.guard.flush()
                    self.write_checkpoint()
                    signals.written()
                if request is StopRequest.STOP and not last:
                    self.writer.wait(needed=True)
                    raise Preempted(f"stopped after step {step} of {settings.steps}, as asked")
                if self.options.on_step:
                    self.options.on_step(state)
            self.guard.flush()
        return values

    def write_checkpoint(self) -> None:
        """Write where the run stands: whole, from the main rank in the background, or each rank its part, at once."""
        state, settings, guard = self.state, self.recipe.train, {"guard": self.guard.snapshot()}
        if settings.checkpoint_format == "sharded":
            sharded_checkpoint.write(self.folder.checkpoints, state, guard, settings.keep, self.ranks)
        else:
            self.writer.write(state.step, {**state.snapshot(), **guard})

    def log_step(self, batch: Batch, rate: float, terms: Terms, norm: Tensor) -> dict[str, float]:
        """Log the step that was just done, show it, and give what was logged. Waits for the device."""
        state, ranks = self.state, self.ranks
        values = {
            "loss": float(terms.total.detach()),
            **{name: float(part) for name, part in terms.parts.items()},
            "lr": rate,
            "logit_scale": float(state.encoder.clip.logit_scale.detach().exp()),
            "grad_norm": float(norm),
            "skipped": self.guard.skipped,
            **self.timer.read(state.step),
            **ranks.mean_of(batch_statistics(batch)),
            **sum(ranks.collect(self.counts), Counter()),
            **memory(state.device),
        }
        values |= self.mfu.read(values["samples_per_second"], round(batch.padded_length))
        self.counts.clear()
        self.log.write(state.step, values)
        self.progress.update(state.step, describe_terms(values))
        if warning := self.collapse.warning():
            self.progress.warn(warning)
        return values


def train_step(state: TrainState, batch: Batch, recipe: Recipe) -> tuple[float, Terms, Tensor]:
    """One update; gives the learning rate, the loss and the norm of its gradient. There is no device sync."""
    steps = recipe.train.steps
    phase = state.objective.phase(state.step, steps)
    # Only the start of a run needs a warm-up.
    optim = recipe.optim if phase.start == 0 else replace(recipe.optim, warmup=0)
    rate = phase.rate * learning_rate(state.step - phase.start, phase.end - phase.start, optim)
    set_rate(state.optimizer, rate)
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
    generator.manual_seed(key_of(recipe.train.seed, state.step) >> 1)  # 63 bits
    plan = state.unwrapped_towers.plan(batch.images, generator, state.ranks)
    batch = state.unwrapped_towers.with_further_texts(batch, generator, state.ranks)
    state.optimizer.zero_grad(set_to_none=True)
    if recipe.train.accumulate == 1:
        # The loss is outside of autocast: similarities that carry a gradient are float32. No name holds the features:
        # what the loss does not save for its gradient, such as the patches, is freed before the backward pass.
        further = None if batch.further is None else batch.further.tokens
        terms = state.objective.loss(state.towers(batch.images, batch.token_groups, plan, further), batch, state.ranks)
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
    """Scores of the model as it is, under `evaluate/…`; random generators and the towers' mode stay as they are.

    All ranks must call it, and each embeds its share.
    """
    with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []), torch.no_grad():
        try:
            scores = evaluate(full_encoder(state.encoder).eval())
        finally:
            train_mode(state.encoder)
    return {f"evaluate/{name}": float(score) for name, score in scores.items()}


def with_steps(recipe: Recipe, loader: BatchLoader) -> Recipe:
    """The recipe with `train.steps` settled: where it gives epochs and no number of samples, the data are counted.

    Raises:
        UserError: the data have no end, or so few steps come of them that it is no run.
    """
    settings = recipe.train
    if recipe.knows_steps:
        return recipe
    assert settings.epochs is not None
    steps = getattr(loader, "steps_per_epoch", None)
    if steps is None:
        raise UserError(
            f"train.epochs: data.source {recipe.data.source} has no end; give train.steps, or data.samples for an epoch"
        )
    try:
        recipe = replace(recipe, train=replace(settings, steps=steps_of(settings.epochs, steps)))
        check_warmup(recipe)
    except ValueError as error:
        raise UserError(str(error)) from None
    return recipe


def finished_run(folder: RunFolder, device: torch.device) -> RunResult:
    """The run that a folder holds, read back."""
    if not folder.model.is_dir():
        raise UserError(f"{folder.root} is finished and its model was not kept (train.save_model: false)")
    return RunResult(folder, load(folder.model, device=device)[0], read_results(folder.results))


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
