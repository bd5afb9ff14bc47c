"""The evaluation of a recipe: its tasks are read before the run begins, and scored during the run and at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powerclip.data.columns import Columns
from powerclip.data.paths import expand_path, expand_pattern
from powerclip.data.table import is_table
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import tokenizer_for
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.readers import read_caption_tars, read_captions, read_path, read_sugarcrepe
from powerclip.evaluate.scenes import scene_grounding, scene_tasks
from powerclip.evaluate.tasks import Classification, Task
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.train.data_cache import DataCache
from powerclip.train.recipe import Recipe

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

Evaluation = Callable[["DualEncoder"], Mapping[str, float]]  # `TASK/metric` → share of right answers, 0 to 1

# The main scores, in the order of `describe`.
SCENE_HEADLINES = {
    "retrieval": "scenes/retrieval/mean_recall",
    "zero-shot": "scenes/zero_shot/acc1",
    "composition": "scenes/composition/mean_kind_acc",
    "pointing": "scenes/pointing/pointing_words",
    "swap": "scenes/grounding/swap_words_balanced",
    "sets": "scenes/grounding/set_f1_words_several",
}


def make_evaluation(
    recipe: Recipe,
    encoder: DualEncoder,
    cache: DataCache | None = None,
    ranks: Ranks = SINGLE,
    warn: Callable[[str], None] = lambda text: None,
) -> Evaluation | None:
    """The function that scores a model as `recipe.evaluation` says, or None when it has no tasks.

    All of its data are read here: missing or damaged files are reported before hours of training, not after.

    Args:
        recipe: says what is measured.
        encoder: a model that prepares images as the one that is measured.
        cache: keeps what was read for other runs, and decoded images for the next evaluation.
        ranks: the processes that evaluate together.
        warn: called when images cannot be read and are left out.

    Raises:
        UserError: something is missing or cannot be read.
    """
    cache = cache or DataCache()
    tasks = ranks.raise_on_all(lambda: read_tasks(recipe, encoder, cache))
    if not tasks:
        return None
    tokenizer = CaptionTokenizer(tokenizer_for(encoder))

    def embedder(model: DualEncoder) -> Embedder:
        return Embedder(model, tokenizer, ranks=ranks, pixels=cache.pixels)

    for name, task in tasks.items():
        if not name.startswith("scenes/"):
            corrupt = embedder(encoder).check_images(task.images)
            if corrupt:
                warn(f"evaluation.{name}: {len(corrupt):,} unreadable images are left out: {', '.join(corrupt[:3])}")

    def evaluate(model: DualEncoder) -> dict[str, float]:
        model_embedder = embedder(model)
        scored = {name: task.score(model_embedder).flat() for name, task in tasks.items()}
        return {f"{name}/{metric}": value for name, metrics in scored.items() for metric, value in metrics.items()}

    return evaluate


def read_tasks(recipe: Recipe, encoder: DualEncoder, cache: DataCache) -> dict[str, Task]:
    """The tasks that a recipe names, by the names of their scores."""
    settings = recipe.evaluation
    tasks: dict[str, Task] = {}
    if settings.retrieval is not None:
        tars = expand_pattern(settings.retrieval, "evaluation.retrieval")
        columns = Columns.named(recipe.data.image, recipe.data.captions)

        def read(paths: Sequence[Path]) -> Task:
            return read_captions(paths[0], columns) if is_table(paths[0]) else read_caption_tars(paths)

        tasks["retrieval"] = cache.task(settings.retrieval, tars, read)
    if settings.classification is not None:
        path = expand_path(settings.classification, "evaluation.classification")
        tasks["classification"] = cache.task(settings.classification, [path], lambda paths: _read_classes(paths[0]))
    if settings.composition is not None:
        folder = expand_path(settings.composition, "evaluation.composition")
        tasks["composition"] = cache.task(settings.composition, [folder], lambda paths: read_sugarcrepe(paths[0]))
    if settings.scenes:
        scenes = scene_tasks(settings.scenes, encoder.image_size[0])
        if recipe.data.collective:
            scenes["grounding"] = scene_grounding(settings.scenes, encoder.image_size[0])
        tasks |= {f"scenes/{name}": task for name, task in scenes.items()}
    return tasks


def _read_classes(path: Path) -> Task:
    """Images with classes; UserError when that is something else."""
    task = read_path(path)
    if not isinstance(task, Classification):
        raise UserError(f"evaluation.classification: {path} holds no images with classes")
    return task


def describe(scores: Mapping[str, float]) -> str:
    """The scores as one line: `retrieval 12.7 (R@1: text 5.1, image 4.2)  composition 55.3 ± 2.2`."""
    return "  ".join(_phrases({name: 100 * value for name, value in scores.items()}))


def _phrases(percent: Mapping[str, float]) -> Iterator[str]:
    if "retrieval/mean_recall" in percent:
        text, image = (percent[f"retrieval/{side}_retrieval_recall@1"] for side in ("text", "image"))
        yield f"retrieval {percent['retrieval/mean_recall']:.1f} (R@1: text {text:.1f}, image {image:.1f})"
    if "classification/acc1" in percent:
        yield f"zero-shot {percent['classification/acc1']:.1f}"
    if "composition/acc" in percent:
        yield f"composition {percent['composition/acc']:.1f} ± {percent['composition/acc_standard_error']:.1f}"
    scenes = [f"{label} {percent[name]:.1f}" for label, name in SCENE_HEADLINES.items() if name in percent]
    if scenes:
        yield f"scenes: {', '.join(scenes)}"
    for name, value in percent.items():
        if name.split("/")[0] not in ("retrieval", "classification", "composition", "scenes"):
            yield f"{name} {value:.1f}"
