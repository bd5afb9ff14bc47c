"""Which rule finds a phrase's set of boxes: cosine, the best box, or all boxes within a margin of the best one?

    python benchmarks/set_rules.py MODEL… --scenes 1000
    python benchmarks/set_rules.py MODEL… --grounding $POWERCLIP_DATA/grounding/flickr8k-val.jsonl.gz \
        --images $POWERCLIP_DATA/captions10k/val-000.tar

F1 of phrases in their captions that name one box and several. The margin is the best for the sum of both F1 on the
images of even number; all rules are compared on those of odd number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from centring import data_name, models_on, parse_arguments
from measure import markdown, origin, run, write_result
from torch import Tensor
from torch.nn.functional import normalize

from powerclip.alignment.regions import embed_regions
from powerclip.evaluate import metrics
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.tasks import Grounding

MARGINS = torch.linspace(0, 0.6, 61).tolist()
Phrase = tuple[Tensor, Tensor, Tensor]  # similarities with the boxes [M], their Gram matrix [M, M], gold [M] bool
Rule = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    given = parse_arguments(__doc__)
    rows, found = [], []
    for name, embedder, task in models_on(given):
        even, odd = similarities(embedder, task)
        margin = max(MARGINS, key=lambda margin: sum(mean_f1(even, within(margin))))
        rules: dict[str, Rule] = {
            "best box": within(0.0),
            "cosine": by_cosine,
            f"within {margin:.2f}": within(margin),
            "all boxes": lambda q, gram: torch.ones_like(q, dtype=torch.bool),
        }
        for rule, choose in rules.items():
            one, several = mean_f1(odd, choose)
            found.append({"model": name, "rule": rule, "one": one, "several": several})
            rows.append([name, rule, f"{100 * one:.1f}", f"{100 * several:.1f}"])
            print(*rows[-1], sep=" · ", flush=True)
    table = markdown(rows, ["F1, %", "rule", "one box", "several"])
    print(
        table, write_result(given.output, f"set-rules-{data_name(given)}", origin(), {"rows": found}, table), sep="\n\n"
    )


def similarities(embedder: Embedder, task: Grounding) -> tuple[list[Phrase], list[Phrase]]:
    """The phrases of images of even and of odd number, with two to `most_regions` boxes to choose from."""
    game, grid = task.phrases, embedder.encoder.grid
    queries = normalize(game.queries(embedder)["words"].float(), dim=-1)
    phrases_of = game.phrases_of_images()
    boxes_of = game.boxes if game.objects is None else game.objects
    halves: tuple[list[Phrase], list[Phrase]] = ([], [])

    def choose(image: int, patches: Tensor) -> None:
        numbers = phrases_of.get(image, [])
        boxes = list(dict.fromkeys(box for phrase in numbers for box in boxes_of[phrase]))
        if not 1 < len(boxes) <= task.most_regions:
            return
        masks = metrics.box_masks(torch.tensor(boxes), grid).flatten(1)
        regions = embed_regions(patches[None].float(), masks[None])[0]
        gram = regions @ regions.T
        for number in numbers:
            gold = torch.tensor([box in game.boxes[number] for box in boxes])
            halves[image % 2].append((regions @ queries[number], gram, gold))

    def use(images: Sequence[int], batch: Tensor) -> None:
        for image, patches in zip(images, batch, strict=True):
            choose(image, patches)

    embedder.patches(game.images, use)
    return halves


def within(margin: float) -> Rule:
    """All boxes whose similarity is at most `margin` below the best."""
    return lambda q, gram: q >= q.max() - margin


def by_cosine(q: Tensor, gram: Tensor) -> Tensor:
    """The set whose sum has the highest cosine with the phrase."""
    sets = (torch.arange(1, 2 ** len(q)).unsqueeze(1) >> torch.arange(len(q)) & 1).to(q.dtype)
    lengths = ((sets @ gram) * sets).sum(1).clamp(min=1e-12).sqrt()
    return sets[((sets @ q) / lengths).argmax()].bool()


def mean_f1(phrases: list[Phrase], rule: Rule) -> list[float]:
    """Mean F1 of the phrases with one box, and of those with several."""
    scores: dict[bool, list[float]] = {False: [], True: []}
    for q, gram, gold in phrases:
        chosen = rule(q, gram)
        scores[bool(gold.sum() > 1)].append(2 * float((chosen & gold).sum()) / float(chosen.sum() + gold.sum()))
    return [sum(values) / len(values) for values in (scores[False], scores[True])]


if __name__ == "__main__":
    run(main)
