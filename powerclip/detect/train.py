"""Training a detector on the boxes of base classes: the learned part around a tower that stays, or is slowly tuned.

The machinery is training's own: checkpoints, log, optimiser, and what is done about a loss that is not finite. A step
is a function of the seed and its number, so a run that was killed and resumed ends as one that never stopped.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from powerclip.data.keyed_random import key_of
from powerclip.detect.calibrate import Calibration, choose_exponents, deal
from powerclip.detect.classes import embed_classes
from powerclip.detect.coco import read_coco
from powerclip.detect.data import BoxSet
from powerclip.detect.detector import Detector, HeadConfig
from powerclip.detect.loader import BoxLoader
from powerclip.detect.recipe import SCENES, DetectFolder, DetectRecipe
from powerclip.detect.saved import Exponents, TrainedDetector, save_detector
from powerclip.detect.scene_boxes import scene_boxes
from powerclip.encoders import DualEncoder, load
from powerclip.errors import UserError
from powerclip.objectives import Terms
from powerclip.runtime.distributed import choose_device
from powerclip.runtime.environment import note_environment
from powerclip.runtime.progress import Progress, duration
from powerclip.runtime.signals import Preempted, Signals, StopRequest
from powerclip.train.checkpoint import CheckpointWriter, newest
from powerclip.train.guard import Guard, mark_loss, step_if_finite
from powerclip.train.loop import explain_out_of_memory
from powerclip.train.metrics import MetricsLog, read_metrics
from powerclip.train.optimizer import learning_rate, make_optimizer, set_rate
from powerclip.train.parallel import clip_gradients
from powerclip.train.results import Results, seconds_per_step, write_results
from powerclip.train.statistics import StepTimer, memory

LOG_EVERY = 20
CHECKPOINT_EVERY, CHECKPOINT_MINUTES, KEEP = 500, 5.0, 2
MAX_SKIPPED = 10


def read_boxes(data: str, images: list[str], scenes: int, part: str) -> BoxSet:
    """The boxes that `--data` and `--images` name; scenes of the part `train` or `val`."""
    if data == SCENES:
        if images:
            raise UserError("--images belongs to a COCO file: scenes are drawn")
        return scene_boxes(scenes, part="train" if part == "train" else "val")
    return read_coco(Path(data).expanduser(), [Path(one).expanduser() for one in images])


def describe_run(recipe: DetectRecipe, output: str | Path) -> list[str]:
    """What `train_detector` would do, in lines; nothing is written.

    Raises:
        UserError: the data or the model are not usable.
    """
    data = read_boxes(recipe.data, recipe.images, recipe.scenes, "train")
    learned = data.base()
    encoder, _, _ = load(recipe.model, recipe.pretrained)
    detector = Detector(encoder, HeadConfig(recipe.size, recipe.width, recipe.hidden))
    parameters = sum(p.numel() for p in detector.parameters())
    tower = sum(p.numel() for p in encoder.clip.visual.parameters())
    patches = -(-recipe.size // detector.patch)
    chosen = "as given" if recipe.exponents else f"chosen after {calibration_steps(recipe):,} more steps"
    state = "holds a run (--resume or --overwrite)" if not DetectFolder(Path(output)).is_empty() else "is free"
    return [
        *data.faults,
        f"data        {len(learned):,} images with {learned.boxes:,} boxes of "
        f"{int((learned.counts() > 0).sum())} base classes",
        f"tower       {recipe.model}, {tower:,} parameters, {'tuned' if recipe.tune else 'as it is'}; images up to "
        f"{recipe.size} pixels, {patches} × {patches} patches",
        f"detector    {parameters:,} parameters, maps at strides {', '.join(map(str, detector.pyramid.strides))}",
        f"run         {recipe.steps:,} steps of {recipe.batch_size} images, "
        f"{recipe.steps * recipe.batch_size / len(learned):.1f} epochs; exponents {chosen}",
        f"output      {output} {state}",
    ]


def calibration_steps(recipe: DetectRecipe) -> int:
    """Updates of the detector that exponents are chosen with."""
    return recipe.calibration_steps or max(1, recipe.steps // 2)


def train_detector(
    recipe: DetectRecipe,
    output: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    console: Console | None = None,
    checkpoint_every: int = CHECKPOINT_EVERY,
) -> DetectFolder:
    """Train a detector from its first step, or from its newest good checkpoint, to its last.

    Unless the recipe gives the exponents, a detector that does not see some of the base classes is trained first, and
    they are chosen with it: `calibrate`.

    Raises:
        UserError: the folder holds another run, the data or the model are not usable, the loss is no longer finite.
        Preempted: SIGTERM was received; a checkpoint of the last step is written.
    """
    began = time.perf_counter()
    folder = DetectFolder(Path(output))
    progress = Progress(folder.root.name, recipe.steps, unit="step", every=10, quiet=quiet, console=console)
    with folder.lock(progress.warn), explain_out_of_memory():
        if not resume:
            folder.check_free(overwrite=overwrite)
        chosen = choose_device(device, setting="--device")
        # What cannot be read fails here, before anything is written.
        data = read_boxes(recipe.data, recipe.images, recipe.scenes, "train")
        for line in data.faults:
            progress.warn(line)
        learned = data.base()
        encoder, _, tokenizer = load(recipe.model, recipe.pretrained, chosen)
        if folder.open_run(recipe, resume=resume, overwrite=overwrite) and folder.finished:
            progress.say(f"{folder.root} is finished: nothing to resume")
            return folder
        note_environment(folder.environment, 0)
        texts = embed_classes(encoder, tokenizer, learned.classes.names)
        progress.say(
            f"{len(learned):,} images with {learned.boxes:,} boxes of {int((learned.counts() > 0).sum())} base classes"
        )
        options: dict[str, Any] = {"quiet": quiet, "console": console, "checkpoint_every": checkpoint_every}
        if recipe.exponents:
            exponents = Exponents(*recipe.exponents)
        else:
            exponents = calibrate(recipe, folder.calibration, learned, texts, encoder, options)
        run = Training(recipe, folder, learned, texts, encoder, **options)
        last = run.run()
        save_detector(folder, TrainedDetector(run.detector, tokenizer, learned.classes.names, exponents))
        results = Results(
            steps=recipe.steps,
            seconds=time.perf_counter() - began,
            seconds_per_step=seconds_per_step(read_metrics(folder.metrics), recipe.batch_size),
            last=last,
        )
        write_results(folder.results, results)
        shutil.rmtree(folder.checkpoints)  # a finished detector needs none
        progress.say(f"{folder.root} finished after {recipe.steps} steps ({duration(results.seconds)})")
    return folder


def calibrate(
    recipe: DetectRecipe,
    folder: DetectFolder,
    learned: BoxSet,
    texts: Tensor,
    tower: DualEncoder,
    options: dict[str, Any],
) -> Exponents:
    """The exponents, chosen on base classes alone: some are held out, as if they were novel, and some of the images."""
    progress = Progress("calibration", quiet=options["quiet"], console=options["console"])
    found = Calibration.read(folder.exponents)
    if found is None:
        parts = deal(learned, recipe.seed)
        steps = calibration_steps(recipe)
        shorter = replace(recipe, steps=steps, warmup=min(recipe.warmup, steps), seed=key_of(recipe.seed, 1) % 2**32)
        # Tuned, the tower would go on from here: what it learns shall not depend on the calibration.
        encoder = copy.deepcopy(tower) if recipe.tune else tower
        run = Training(shorter, folder, parts.kept, texts[parts.kept_labels], encoder, **options)
        run.run()
        found = choose_exponents(run.detector, parts, texts[parts.labels], quiet=options["quiet"])
        found.write(folder.exponents)
        shutil.rmtree(folder.checkpoints)
    progress.say(found.describe())
    if warning := found.warning():
        progress.warn(warning)
    return found.exponents


class Training:
    """One detector from its first step to its last, or from where a checkpoint of it stands.

    Args:
        recipe: what to run.
        folder: where its checkpoints and its log go.
        data: images with boxes of the classes that are learned.
        texts: the text embeddings of these classes [K, D].
        encoder: the towers; the image tower is tuned if the recipe says so.
        quiet: print warnings only.
        console: where to print.
        checkpoint_every: steps between checkpoints.
    """

    def __init__(
        self,
        recipe: DetectRecipe,
        folder: DetectFolder,
        data: BoxSet,
        texts: Tensor,
        encoder: DualEncoder,
        *,
        quiet: bool = False,
        console: Console | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
    ):
        self.recipe, self.folder, self.texts, self.checkpoint_every = recipe, folder, texts, checkpoint_every
        self.progress = Progress(folder.root.name, recipe.steps, unit="step", every=10, quiet=quiet, console=console)
        torch.manual_seed(recipe.seed)
        config = HeadConfig(recipe.size, recipe.width, recipe.hidden)
        self.detector = Detector(encoder, config, bf16=texts.device.type == "cuda").train()
        self.tower = encoder.clip.visual
        encoder.eval().requires_grad_(False)
        modules: list[torch.nn.Module] = [self.detector]
        if recipe.tune:
            self.tower.requires_grad_(True)
            self.detector.tuned = True
            modules.append(self.tower)
        rates = dict.fromkeys(self.tower.parameters(), recipe.tune / recipe.lr) if recipe.tune else {}
        self.optimizer = make_optimizer(modules, recipe.optim, rates)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.guard = Guard(MAX_SKIPPED, modules, self.progress.warn)
        self.loader = BoxLoader(data, recipe.size, recipe.batch_size, recipe.seed)
        self.step = 0
        self.counts: Counter[str] = Counter()
        saved = newest(folder.checkpoints, self.progress.warn)
        if saved is not None:
            self.restore(saved)
            self.progress.say(f"{folder.root} continues after step {self.step} of {recipe.steps}")

    def run(self) -> dict[str, float]:
        """Take all steps; gives what was logged at the last one."""
        recipe, folder = self.recipe, self.folder
        folder.root.mkdir(parents=True, exist_ok=True)
        log = MetricsLog(folder.metrics, folder.tensorboard, after=self.step)
        writer = CheckpointWriter(folder.checkpoints, KEEP, self.progress.warn)
        timer = StepTimer(self.step, recipe.batch_size)
        values: dict[str, float] = {}
        self.progress.skip(self.step)
        try:
            with (
                self.progress,
                Signals(CHECKPOINT_MINUTES) as signals,
                closing(self.loader.stream(self.step, recipe.steps)) as batches,
            ):
                for batch in timer.time_batches(batches):
                    rate, terms, norm = self.train_step(batch.images, batch.boxes, batch.labels)
                    self.guard.check(self.step, terms, norm)
                    self.counts.update(batch.counts)
                    last = self.step == recipe.steps
                    self.progress.update(self.step)
                    if last or self.step == 1 or self.step % LOG_EVERY == 0:
                        values = self.describe(rate, terms, norm) | timer.read(self.step) | memory(self.texts.device)
                        log.write(self.step, values)
                        shown = "  ".join(f"{name} {values[name]:.3f}" for name in ("loss", "objectness", "naming"))
                        self.progress.update(self.step, f"{shown}  {values['samples_per_second']:,.0f} images/s")
                    request = signals.request()
                    if last or request or self.step % self.checkpoint_every == 0:
                        self.guard.flush()
                        writer.write(self.step, self.snapshot())
                        signals.written()
                    if request is StopRequest.STOP and not last:
                        writer.wait(needed=True)
                        raise Preempted(f"stopped after step {self.step} of {recipe.steps}, as asked")
        finally:
            log.close()
            writer.wait()
        self.detector.eval()
        return values or dict(list(read_metrics(folder.metrics))[-1])

    def train_step(
        self, images: list[Tensor], boxes: list[Tensor], labels: list[Tensor]
    ) -> tuple[float, Terms, Tensor]:
        """One update; gives the learning rate, the loss and the norm of its gradient."""
        recipe = self.recipe
        # Anchors and boxes are sampled by torchvision from torch's generator: a step's draws are its own.
        torch.manual_seed(key_of(recipe.seed, self.step) % 2**63)
        rate = learning_rate(self.step, recipe.steps, recipe.optim)
        set_rate(self.optimizer, rate)
        losses = self.detector.losses(images, boxes, labels, self.texts)
        total = torch.stack(list(losses.values())).sum()
        self.optimizer.zero_grad()
        mark_loss(total).backward()
        norm = clip_gradients(self.parameters, recipe.grad_clip)
        step_if_finite(self.optimizer, norm)
        self.step += 1
        return rate, Terms(total, {name: loss.detach() for name, loss in losses.items()}), norm

    def describe(self, rate: float, terms: Terms, norm: Tensor) -> dict[str, float]:
        """What is logged of a step."""
        parts = {name: float(part) for name, part in terms.parts.items()}
        skipped = {"skipped": self.guard.skipped, "unreadable": self.counts["unreadable"]}
        self.counts.clear()
        return {"loss": float(terms.total.detach()), **parts, "lr": rate, "grad_norm": float(norm), **skipped}

    def snapshot(self) -> dict[str, Any]:
        """Everything that changes from step to step."""
        tower = self.tower.state_dict() if self.recipe.tune else None
        state = {"detector": self.detector.state_dict(), "optimizer": self.optimizer.state_dict(), "tower": tower}
        return {**state, "guard": self.guard.snapshot()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue where a snapshot stopped."""
        self.step = saved["step"]
        self.detector.load_state_dict(saved["detector"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.recipe.tune:
            self.tower.load_state_dict(saved["tower"])
        self.guard.restore(saved["guard"])
