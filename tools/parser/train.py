"""Train the embedded parser.

    python tools/parser/train.py --treebank data/treebank --silver data/trees.tsv.gz -o runs/parser
    python tools/parser/train.py --treebank data/treebank --silver data/trees.tsv.gz --learn-from coco- -o runs/open
    python tools/parser/train.py --treebank data/treebank -o runs/try --early 0 --late 2

A conditional random field over trees: the score of the gold tree against the log-sum over all trees of the sentence.
Early epochs read gold and silver, late ones gold and a sample of silver; the network is told which it reads, so that
silver teaches it words and captions, not its mistakes. Part-of-speech tags are an auxiliary target of the first layer.
Weights are an average over steps; those of the best epoch on the development documents are written, with a card of
their figures.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from augment import augment
from scoring import by_genre, evaluate
from torch import Tensor, nn
from torch.nn import functional as F
from treebank import Sentence, read_silver, read_treebank

from powerclip.annotate.parsers.chart import cell, log_partition
from powerclip.annotate.parsers.lexicon import CHAIN, Lexicon
from powerclip.annotate.parsers.model import GOLD, ParserModel, save_model
from powerclip.annotate.parsers.network import Size, SpanNetwork
from powerclip.annotate.parsers.word_features import SPECIAL, UNKNOWN, normalise
from powerclip.errors import UserError
from powerclip.runtime.distributed import choose_device
from powerclip.runtime.files import write_atomic

SILVER = 1  # beside GOLD: which trees are read
_MOST_CELLS = 80_000  # of a batch's charts, twice over: bounds the memory that a step takes
_SCORE_EVERY = 2  # late epochs
_KNOWN_WORD = 2  # occurrences that make a word known
_KNOWN_CHAIN = 10  # occurrences that make a unary chain a label of its own


@dataclass(frozen=True)
class Settings:
    """How to train. Defaults are those of the weights that ship."""

    seed: int = 0
    early: int = 4  # epochs of all gold and all silver
    late: int = 40  # epochs of all gold and some silver
    late_silver: float = 0.5  # silver trees in a late epoch, for each gold one
    silver_weight: float = 0.5  # of a silver tree's loss
    tag_weight: float = 0.5
    batch: int = 32  # sentences
    early_batch: int = 128  # the same in the early epochs
    lr: float = 1.5e-3
    warmup: int = 200  # steps
    weight_decay: float = 1e-2
    dropout: float = 0.4
    word_dropout: float = 0.5  # a word seen k times is unknown with probability w / (w + k)
    average: float = 0.999  # of the weights, from step to step
    hidden: int = 208
    word_width: int = 96
    piece_width: int = 128
    span_width: int = 192
    buckets: int = 8192
    longest: int = 100  # words of a sentence to learn from
    minutes: float = 0.0  # ends the learning rate's course, and training, earlier; 0 for no limit


def build_lexicon(sentences: Iterable[Sentence], buckets: int) -> Lexicon:
    """The words that occur more than once and the labels of `sentences`."""
    words: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    for sentence in sentences:
        words.update(normalise(word).lower() for word in sentence.words)
        labels.update(label for _, _, label in sentence.spans)
    known = sorted(word for word, count in words.items() if count >= _KNOWN_WORD)
    kept = sorted(label for label, count in labels.items() if count >= _KNOWN_CHAIN or CHAIN not in label)
    return Lexicon([*SPECIAL, *known], kept, buckets)


@dataclass(frozen=True)
class Example:
    """A sentence as numbers."""

    rows: list[int]  # of the lexicon
    tags: list[int]
    spans: list[tuple[int, int, int]]
    source: int


class Trainer:
    """Network, data and optimiser of one run."""

    def __init__(self, gold: list[Sentence], silver: list[Sentence], settings: Settings, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        self.random = random.Random(settings.seed)
        self.settings, self.device = settings, device
        self.gold = [sentence for sentence in gold if len(sentence.words) <= settings.longest]
        self.silver = silver
        self.lexicon = build_lexicon([*gold, *silver], settings.buckets)
        tags = sorted({tag for sentence in [*gold, *silver] for tag in sentence.tags})
        self.tags = {tag: number for number, tag in enumerate(tags)}
        self.silver_examples = [self._example(sentence, SILVER) for sentence in silver]
        sizes = {
            name: getattr(settings, name) for name in ("hidden", "word_width", "piece_width", "span_width", "buckets")
        }
        size = Size(words=len(self.lexicon.words), labels=len(self.lexicon.labels), **sizes)
        self.network = SpanNetwork(size, settings.dropout).to(device)
        self.tagger = nn.Linear(2 * settings.hidden, len(tags)).to(device)
        self.average = copy.deepcopy(self.network).eval()
        seen = Counter(normalise(word).lower() for sentence in [*gold, *silver] for word in sentence.words)
        rare = [settings.word_dropout / (settings.word_dropout + seen[word]) for word in self.lexicon.words]
        self.rare = torch.tensor(rare, device=device)
        self.rare[:3] = 0
        parameters = [*self.network.parameters(), *self.tagger.parameters()]
        self.optimizer = torch.optim.AdamW(
            parameters, lr=settings.lr, betas=(0.9, 0.98), weight_decay=settings.weight_decay
        )
        self.began = time.perf_counter()
        self.steps = 0
        self.total_steps = self._estimate_steps()

    def _estimate_steps(self) -> int:
        late = len(self.gold) * (1 + self.settings.late_silver * bool(self.silver))
        early = len(self.gold) + len(self.silver)
        settings = self.settings
        steps = settings.early * early / settings.early_batch + settings.late * late / settings.batch
        return math.ceil(1.05 * steps)  # long sentences make some batches smaller

    def progress(self) -> float:
        """How much of the run is done, 0 to 1, by steps or by the clock."""
        limit = 60 * self.settings.minutes
        clock = (time.perf_counter() - self.began) / limit if limit else 0.0
        return min(1.0, max(self.steps / self.total_steps, clock))

    def epoch(self, late: bool) -> float:
        """Read the data once; gives the mean loss of a sentence."""
        examples = [self._example(augment(sentence, self.random), GOLD) for sentence in self.gold]
        count = round(self.settings.late_silver * len(self.gold)) if late else len(self.silver_examples)
        examples += self.random.sample(self.silver_examples, min(count, len(self.silver_examples)))
        total = torch.zeros((), device=self.device)
        self.network.train()
        for batch in self._batches(examples, self.settings.batch if late else self.settings.early_batch):
            total += self._step(batch)
        return float(total) / len(examples)

    def _example(self, sentence: Sentence, source: int) -> Example:
        rows = [self.lexicon.row(word) for word in sentence.words]
        spans = [(first, end, self.lexicon.label(chain)) for first, end, chain in sentence.spans]
        return Example(rows, [self.tags[tag] for tag in sentence.tags], spans, source)

    def _batches(self, examples: list[Example], size: int) -> list[list[Example]]:
        """Sentences of about the same length together, in random order."""
        keyed = sorted(examples, key=lambda example: len(example.rows) * self.random.uniform(0.85, 1.15))
        batches: list[list[Example]] = [[]]
        for example in keyed:
            if len(batches[-1]) >= size or len(batches[-1]) * len(example.rows) ** 2 > _MOST_CELLS:
                batches.append([])
            batches[-1].append(example)
        self.random.shuffle(batches)
        return batches

    def _step(self, batch: list[Example]) -> Tensor:
        progress = self.progress()
        rate = min(1.0, (self.steps + 1) / self.settings.warmup) * (0.5 + 0.5 * math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * max(rate, 0.01)
        losses = self._loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        (losses.sum() / len(batch)).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 5.0)
        self.optimizer.step()
        self.steps += 1
        self._update_average()
        return losses.detach().sum()

    @torch.no_grad()
    def _update_average(self) -> None:
        keep = min(self.settings.average, self.steps / (self.steps + 10))
        for old, new in zip(self.average.parameters(), self.network.parameters(), strict=True):
            old.lerp_(new, 1 - keep)

    def _loss(self, batch: list[Example]) -> Tensor:
        """The loss of each sentence: minus the log-probability of its tree, and that of its tags."""
        lengths = torch.tensor([len(example.rows) for example in batch])
        longest = int(lengths.max())
        source = torch.tensor([example.source for example in batch], device=self.device)
        between, first = self.network.encode(self._vectors(batch, longest), source, lengths)
        scores = self.network.scores(between)
        partition = log_partition(torch.logsumexp(scores, dim=-1), lengths.to(self.device))
        spans = [
            (at, cell(begin, end, longest), label)
            for at, example in enumerate(batch)
            for begin, end, label in example.spans
        ]
        sentence, where, label = torch.tensor(spans, device=self.device).unbind(1)
        tree = partition.index_add(0, sentence, scores[sentence, where, label], alpha=-1)
        weight = torch.where(source == GOLD, 1.0, self.settings.silver_weight)
        return weight * (tree + self.settings.tag_weight * self._tag_loss(first, batch))

    def _vectors(self, batch: list[Example], longest: int) -> Tensor:
        """Word vectors, B × (n + 2) × D, with some words made unknown: the rarer, the more often."""
        table = torch.ones(len(batch), longest + 2, dtype=torch.long)  # row 1 of the lexicon is the end mark
        table[:, 0] = 0  # and row 0 the begin mark
        for row, example in zip(table, batch, strict=True):
            row[1 : len(example.rows) + 1] = torch.tensor(example.rows)
        rows, inverse = table.unique(return_inverse=True)
        vocabulary = torch.tensor([self.lexicon.vocabulary_of[row] for row in rows.tolist()], device=self.device)
        pieces, offsets = self.lexicon.pieces(rows.tolist())
        inverse = inverse.to(self.device)
        words = vocabulary[inverse]
        words = words.masked_fill(torch.rand(words.shape, device=self.device) < self.rare[words], UNKNOWN)
        spelled = self.network.pieces(pieces.to(self.device), offsets.to(self.device))
        return torch.cat([self.network.word(words), spelled[inverse]], dim=-1)

    def _tag_loss(self, states: Tensor, batch: list[Example]) -> Tensor:
        """Cross-entropy of the tags, summed over each sentence."""
        tags = torch.full(states.shape[:2], -100)  # what cross_entropy leaves out
        for row, example in zip(tags, batch, strict=True):
            row[: len(example.tags)] = torch.tensor(example.tags)
        logits = self.tagger(F.dropout(states, self.settings.dropout))
        return F.cross_entropy(logits.transpose(1, 2), tags.to(self.device), reduction="none").sum(1)


@dataclass(frozen=True)
class Material:
    """What to learn from, as files."""

    treebank: Path
    silver: Path | None
    learn_from: str  # beginning of the keys of the silver trees to learn from
    sources: Path | None  # JSON: origin and licence of the material, for the card


def train(material: Material, output: Path, settings: Settings, device: torch.device, test: bool) -> dict[str, object]:
    """Train, write `parser.safetensors` and `card.json` into `output`, and give what the card says."""
    sources = _read_sources(material.sources) if material.sources else {}
    gold = read_treebank(material.treebank)
    captions: dict[str, list[Sentence]] = {"train": [], "test": []}
    if material.silver:
        captions = read_silver(material.silver, material.learn_from)
    output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(gold["train"], captions["train"], settings, device)
    began = time.perf_counter()
    best, best_weights, history = -1.0, None, []
    epochs = settings.early + settings.late
    for epoch in range(1, epochs + 1):
        loss = trainer.epoch(late=epoch > settings.early)
        seconds = time.perf_counter() - began
        over = epoch == epochs or trainer.progress() == 1
        if not over and (epoch < settings.early or (epoch - settings.early) % _SCORE_EVERY):
            print(f"epoch {epoch}: loss {loss:.2f}, {seconds:.0f} s", flush=True)
            continue
        score = evaluate(ParserModel(trainer.average, _fresh(trainer.lexicon), device), gold["dev"])
        history.append({"epoch": epoch, "loss": round(loss, 3), "dev_unlabelled_f1": round(score.f1("unlabelled"), 2)})
        print(
            f"epoch {epoch}: loss {loss:.2f}, {seconds:.0f} s, dev F1 {score.f1('unlabelled'):.2f} unlabelled, "
            f"{score.f1('labelled'):.2f} labelled, {score.f1('inner'):.2f} inner",
            flush=True,
        )
        if score.f1("unlabelled") > best:
            best = score.f1("unlabelled")
            best_weights = copy.deepcopy(trainer.average)
            save_model(output / "parser.safetensors", best_weights, trainer.lexicon)
        if over:
            break
    assert best_weights is not None
    final = ParserModel(best_weights.half().float(), _fresh(trainer.lexicon), device)
    card: dict[str, object] = {
        **sources,
        "settings": dataclasses.asdict(settings),
        "sentences": {f"gold {part}": len(sentences) for part, sentences in gold.items()}
        | {f"silver {part}": len(sentences) for part, sentences in captions.items()},
        "parameters": sum(parameter.numel() for parameter in final.network.parameters()),
        "words": len(trainer.lexicon.words),
        "labels": len(trainer.lexicon.labels),
        "seconds": round(time.perf_counter() - began),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dev": evaluate(final, gold["dev"]).summary(),
        "silver": evaluate(final, captions["test"]).summary() if captions["test"] else None,
        "history": history,
    }
    if test:
        card["test"] = evaluate(final, gold["test"]).summary()
        card["test_by_genre"] = {name: score.summary() for name, score in by_genre(final, gold["test"]).items()}
    write_atomic(output / "card.json", (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode())
    return card


def _read_sources(path: Path) -> dict[str, object]:
    try:
        sources = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--sources {path}: not a JSON file ({error})") from None
    if not isinstance(sources, dict):
        raise UserError(f"--sources {path}: a mapping such as tools/parser/sources.json should stand there")
    return sources


def _fresh(lexicon: Lexicon) -> Lexicon:
    """The same words and labels, with no rows: a model fills and clears its own."""
    return Lexicon(lexicon.words, lexicon.labels, lexicon.buckets)


def main(arguments: Iterable[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python tools/parser/train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--treebank", type=Path, required=True, help="folder of gold .ptb files")
    parser.add_argument("--silver", type=Path, help="gzipped lines of key, number and tree; without it gold alone")
    parser.add_argument("--learn-from", default="", help="learn only from silver trees whose key begins so, as coco-")
    parser.add_argument("--sources", type=Path, help="JSON file of origins and licences that the card repeats")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for parser.safetensors and card.json")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--test", action="store_true", help="also score the test documents: once, at the very end")
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    options = vars(parser.parse_args(None if arguments is None else list(arguments)))
    settings = Settings(**{field.name: options[field.name] for field in dataclasses.fields(Settings)})
    device = choose_device(options["device"], setting="--device")
    material = Material(*(options[field.name] for field in dataclasses.fields(Material)))
    card = train(material, options["output"], settings, device, options["test"])
    shown = {name: card.get(name) for name in ("parameters", "seconds", "dev", "silver", "test")}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
