"""What a recipe would run: how large the model is, how long it takes, on which data, and what is written where.

Nothing is written. The data need not exist: missing files are listed. Speed and memory come from a short burst of
real steps on noise of the right shape, on the device that the run would use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from powerclip.data.batch import Batch
from powerclip.encoders.models import Blueprint
from powerclip.encoders.resolve import resolve
from powerclip.errors import UserError
from powerclip.runtime.progress import duration, print_line
from powerclip.train.communication import FAST, seconds, traffic
from powerclip.train.data import annotation_inputs
from powerclip.train.inputs import Input, inputs, samples_of, tables_of
from powerclip.train.loop import train_step
from powerclip.train.memory import (
    GIB,
    count,
    estimate,
    misfit,
    synthetic_batch,
    trained_parameters,
)
from powerclip.train.mfu import operations, peak_flops
from powerclip.train.recipe import Recipe, check_warmup, steps_of
from powerclip.train.run_folder import RunFolder
from powerclip.train.sections import ModelSection
from powerclip.train.state import TrainState, start

# A burst on a CPU grows until one step takes this long.
ENOUGH_SECONDS = 1.0
CHECKPOINT_BYTES = 12  # of a trained parameter: its weight and AdamW's two moments in float32
TYPICAL_NODES = 12.0  # mean K of web captions


@dataclass(frozen=True)
class Burst:
    """A few real steps of `pairs` pairs."""

    pairs: int
    seconds: float  # of a step
    seconds_per_pair: float  # of one more pair
    length: int  # tokens of a caption row
    peak_bytes: int | None  # on the GPU

    def step(self, pairs: int) -> float:
        """Seconds that a step of `pairs` would take, if time grows in a line."""
        return max(self.seconds / self.pairs, self.seconds + (pairs - self.pairs) * self.seconds_per_pair)


def dry_run(recipe: Recipe, output: str | Path, *, quiet: bool = False, console: Console | None = None) -> None:
    """Print what `train` would do.

    Raises:
        UserError: the model cannot be built, or there is no such device.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if int(os.environ.get("RANK", "0")):
        return
    console = console or Console()

    def say(head: str, text: str) -> None:
        print_line(console, f"{head:12}{text}")

    files = list(inputs(recipe))
    recipe, length, known = settled(recipe, files)
    # Weights need not be fetched to be counted, and the burst is one part of a batch that goes through in parts.
    once = replace(recipe.train, accumulate=1)
    blueprint, weights = find_towers(recipe.model)
    files += weights
    burst_recipe = replace(recipe.with_towers(blueprint.config), train=once)
    state = start(burst_recipe)
    state.encoder.directory = blueprint.directory
    for head, text in describe_run(recipe, state, length, files):
        say(head, text)
    if not quiet:
        say("", "measuring a few steps …")
    pairs = max(2, recipe.train.batch_size // ranks // recipe.train.accumulate)
    burst = measure(burst_recipe, state, pairs)
    for head, text in describe_cost(recipe, state, burst, ranks, pairs, steps=recipe.train.steps if known else None):
        say(head, text)
    for head, text in describe_output(recipe, state, RunFolder(Path(output))):
        say(head, text)


def find_towers(model: ModelSection) -> tuple[Blueprint, list[Input]]:
    """The towers of a recipe, and its weights if they are missing.

    Raises:
        UserError: without the weights it is not known which towers are meant, or there are no such towers.
    """
    try:
        return resolve(model.name, model.config, model.pretrained), []
    except UserError as error:
        if model.pretrained is None or (model.name is None and model.config is None):
            raise
        missing = Input("model.pretrained", "", problem=str(error))
        return resolve(model.name, model.config), [missing]


def settled(recipe: Recipe, files: list[Input]) -> tuple[Recipe, str, bool]:
    """The recipe with its number of steps, that length in words, and whether it is known."""
    train, samples = recipe.train, samples_of(recipe, files)
    if train.epochs is not None and not recipe.knows_steps:
        if samples is None:
            return recipe, f"{train.epochs:g} epochs; how many steps that is shows when the data are there", False
        try:
            train = replace(train, steps=steps_of(train.epochs, samples // train.batch_size))
            check_warmup(replace(recipe, train=train))
        except ValueError as error:
            raise UserError(str(error)) from None
    shown = train.steps * train.batch_size
    text = f"{train.steps:,} steps × {train.batch_size:,} pairs = {shown:,} pairs"
    if samples:
        text += f", {shown / samples:.4g} epochs of {samples:,}"
    return replace(recipe, train=train), text, True


def describe_run(recipe: Recipe, state: TrainState, length: str, files: list[Input]) -> Iterator[tuple[str, str]]:
    """Model, objective, device, length and data, as lines."""
    clip, optim = state.encoder.clip, recipe.optim
    image, total, extra = count(clip.visual), count(state.encoder), count(state.objective)
    rows, columns = state.encoder.grid
    yield "model", f"{model_name(recipe.model)}: {total / 1e6:.1f} M parameters"
    yield "", f"image tower {image / 1e6:.1f} M, {clip.visual.image_size[0]}² pixels, {rows} × {columns} patches"
    yield "", f"text tower {(total - image) / 1e6:.1f} M, {state.encoder.context_length} tokens"
    if recipe.model.pretrained:
        anew = f"; drawn anew: {recipe.model.redraw}" if recipe.model.redraw else ""
        yield "", f"starts from {recipe.model.pretrained}{anew}"
    trained = count(state.encoder, trained=True)
    if trained < total:
        settings = recipe.train
        how = [f"freeze {settings.freeze}"] * bool(settings.freeze) + [f"LoRA of rank {settings.lora}"] * bool(
            settings.lora
        )
        yield "", f"trains {trained:,} of them ({', '.join(how)})"
        if settings.precompute:
            depth = state.encoder.blocks_before
            yield "", f"the image tower's first {depth} blocks run once for each image (precompute)"
    parameters = f" ({extra:,} parameter{'s' * (extra > 1)} of its own)" if extra else ""
    yield "objective", recipe.objective + parameters
    for text in describe_objective(recipe):
        yield "", text
    device = torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else "CPU"
    how = [precision(state)] + ["compiled"] * (state.unwrapped_towers.compile_mode != "none")
    yield "device", f"{device}, {', '.join(how)}"
    yield "length", length
    rate = f"lr {optim.lr:g}, {optim.schedule}, {optim.warmup:,} steps of warm-up"
    yield "optimiser", f"AdamW, {rate}, weight decay {optim.weight_decay:g}"
    yield "data", recipe.data.source
    shards = next((item.paths for item in files if item.setting == "data.shards"), ())
    if tables := tables_of(recipe, files):
        shards = tuple(tables.paths)
    found = annotation_inputs(recipe, shards) if shards or recipe.data.source == "scenes" else ()
    for item in (*files, *found):
        yield "", f"{item.setting}: {f'MISSING: {item.problem}' if item.problem else item.summary}"


def model_name(model: ModelSection) -> str:
    """What a recipe calls its towers."""
    if model.config is not None:
        return "towers of the recipe"
    return model.name or f"towers of {model.pretrained}"


def describe_objective(recipe: Recipe) -> Iterator[str]:
    """What decides the loss, in the paper's letters, as lines."""
    if recipe.objective != "powerclip":
        if recipe.objective_settings:
            yield ", ".join(f"{name} {value}" for name, value in recipe.objective_settings.items())
        return
    config, regions = recipe.alignment, recipe.regions
    contrast = f"triplet, γ {config.gamma:g}" if config.loss == "triplet" else "softmax"
    number = f" ({config.k})" if config.negatives == "k" else ""
    yield f"preset {config.preset}: loss {contrast}, negatives {config.negatives}{number}, λ {config.weight:g}"
    sets = "of any size" if config.largest_set == 0 else f"of at most {config.largest_set}"
    yield f"{config.aggregation}, {config.similarity}s, α {config.alpha:g}, τ {config.tau:g}, best sets {sets}"
    kind = {"segments": "stored masks", "partition": "boxes of a random partition"}.get(regions.kind, "random boxes")
    largest = f" of at most {regions.largest:g} of the side" if regions.largest < 1 else ""
    parts = "trees" if config.parse_trees else "single tokens"
    yield f"M {regions.count} {kind}{largest} an image; {parts} of captions"
    if config.mosaics:
        kind = config.mosaic_texts
        texts = "" if kind == "none" else f", {kind} texts × {config.mosaic_texts_weight:g}"
        gold = f", sets × {config.mosaic_sets:g}" if config.mosaic_sets else ""
        yield f"{config.mosaics:.0%} of the images in mosaics too: phrases × {config.mosaic_weight:g}{texts}{gold}"


def describe_cost(
    recipe: Recipe, state: TrainState, burst: Burst, ranks: int, pairs: int, steps: int | None
) -> Iterator[tuple[str, str]]:
    """Memory and time, as lines: what was measured and what follows from it."""
    needed = estimate(recipe, state, ranks)
    parts = f"{needed.state / GIB:.1f} weights, gradients and AdamW's moments"
    if burst.peak_bytes is not None:
        yield "memory", f"{burst.peak_bytes / GIB:.1f} GiB on the GPU with {burst.pairs:,} pairs, measured: {parts}"
        if burst.pairs < pairs:
            fits = recipe.train.accumulate * -(-pairs // burst.pairs)
            yield "", f"{pairs:,} pairs do not fit at once; train.accumulate={fits} sends them through in parts that do"
    else:
        activations = f"{needed.activations / GIB:.1f} activations"
        yield "memory", f"about {needed.total / GIB:.1f} GiB for each process: {parts}, {activations}"
        of_a_pair = f"{needed.pair / 2**20:.1f} MiB for each of {pairs:,} pairs in {precision(state)}"
        yield "", f"activations of the towers, counted: {of_a_pair}; the loss comes on top"
        if problem := misfit(needed, recipe, state):
            yield "", f"DOES NOT FIT: {problem}"
    rounds = recipe.train.batch_size / (pairs * ranks)
    # Accumulation runs the towers once more, without a gradient: a third of a step.
    step = burst.step(pairs) * rounds * (4 / 3 if rounds > 1 else 1)
    run_time = "" if steps is None else f"{duration(step * steps)} for the run, "
    yield "time", f"{run_time}{step:.3g} s a step, without waiting for data"
    beyond = f"; the rest extrapolated in a line to {pairs:,}" if burst.pairs != pairs else ""
    yield "", f"measured: a step of {burst.pairs:,} pairs takes {burst.seconds:.3g} s{beyond}"
    cost, peak = operations(recipe.with_towers(state.encoder.config), burst.length), peak_flops(state.device)
    rate = recipe.train.batch_size / ranks / step
    share = f", {rate * cost / peak:.1%} of the GPU's bf16 rate" if peak else ""
    yield "", f"{cost / 1e9:.1f} GFLOP a pair, {rate:,.1f} pairs/s for each process{share}"
    if ranks > 1:
        yield from describe_messages(recipe, state, ranks)


def describe_messages(recipe: Recipe, state: TrainState, ranks: int) -> Iterator[tuple[str, str]]:
    """What the ranks send each other, estimated, as lines."""
    nodes = TYPICAL_NODES if recipe.objective == "powerclip" else 0.0
    width = state.encoder.embed_dim
    sent = traffic(ranks, recipe.train.batch_size, width, trained_parameters(state), nodes)
    parts = f"{sent.gradients / 2**20:,.0f} gradients, {sent.exposed / 2**20:,.0f} for the loss"
    yield "messages", f"{sent.total / 2**20:,.0f} MiB a step from each of {ranks} ranks: {parts}"
    yield "", f"{1e3 * seconds(sent.total, ranks, FAST):.1f} ms over {FAST.name}, on paper"


def describe_output(recipe: Recipe, state: TrainState, folder: RunFolder) -> Iterator[tuple[str, str]]:
    """What would be written where, as lines."""
    train, size = recipe.train, trained_parameters(state) * CHECKPOINT_BYTES / GIB
    yield "output", f"{folder.root}: {folder_state(folder)}"
    when = [f"every {train.checkpoint_every:,} steps"] if train.checkpoint_every else []
    when += [f"every {train.checkpoint_minutes:g} minutes"] if train.checkpoint_minutes else []
    sizes = f"the last {train.keep} kept: {size:.2f} GiB each, {(train.keep + 1) * size:.2f} GiB while one is written"
    yield "", f"checkpoints/ {' and '.join(when) or 'only when asked by a signal'}, {sizes}"
    if train.save_model:
        yield "", f"model/ at the end: {count(state.encoder) * 4 / GIB:.2f} GiB"
    yield "", "recipe.yaml, environment.json, metrics.jsonl, tensorboard/, results.json"


def folder_state(folder: RunFolder) -> str:
    """What `train` would do with this folder."""
    if folder.finished:
        return "holds a finished run (--overwrite replaces it)"
    if folder.holds_run():
        return "holds an unfinished run (--resume continues it)"
    if folder.root.exists() and (not folder.root.is_dir() or not folder.is_empty()):
        return "is not empty and not a run; choose another --output"
    return "free"


def measure(recipe: Recipe, state: TrainState, pairs: int) -> Burst:
    """Train on noise for a moment: on a GPU with `pairs`, on a CPU with as many as take about a second."""
    gpu = state.device.type == "cuda"
    size = pairs if gpu else min(2, pairs)
    history: list[tuple[int, float]] = []
    while True:
        batch = synthetic_batch(recipe, state.encoder, size).to(state.device)
        try:
            history.append((size, time_steps(recipe, state, batch, warmup=3 if gpu else 1)))
        except torch.OutOfMemoryError:
            if size < 4:
                raise UserError(f"not even {size} pairs fit on {state.device}: take smaller towers") from None
            size //= 2
            torch.cuda.empty_cache()
            continue
        took = history[-1][1]
        # Two sizes tell what one more pair costs from what a step costs anyway.
        if gpu or size >= pairs or took > 5 * ENOUGH_SECONDS or (took > ENOUGH_SECONDS and len(history) > 1):
            break
        size = min(2 * size, pairs)
    (size, took), before = history[-1], history[-2] if len(history) > 1 else None
    slope = took / size if before is None else max(0.0, (took - before[1]) / (size - before[0]))
    peak = torch.cuda.max_memory_allocated(state.device) if gpu else None
    return Burst(size, took, slope, batch.tokens.shape[1], peak)


def time_steps(recipe: Recipe, state: TrainState, batch: Batch, warmup: int, repeats: int = 3) -> float:
    """Seconds of the fastest of some steps: other processes of the machine may have slowed the others."""
    wait: Callable[[], None] = torch.cuda.synchronize if state.device.type == "cuda" else lambda: None
    times = []
    for _ in range(warmup + repeats):
        wait()
        began = time.perf_counter()
        train_step(state, batch, recipe)
        wait()
        times.append(time.perf_counter() - began)
        if len(times) > warmup and times[-1] > 5 * ENOUGH_SECONDS:
            break
    return min(times[warmup:])


def precision(state: TrainState) -> str:
    """What the towers compute in."""
    return "bf16" if state.unwrapped_towers.bf16 else "float32"
