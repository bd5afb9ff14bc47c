"""Metrics of the benchmarks: pure functions of embeddings, scores and boxes, by the names that clip-benchmark has.

Ties count against the model, and so does NaN: a collapsed model must not look perfect. Only in swap accuracy a tie
counts half.

Axes: n images · T phrases · N patches · M regions of an image · D width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from powerclip.alignment.regions import subset_matrix
from powerclip.errors import UserError

Metrics = dict[str, float | None]

CUTOFFS = (1, 5, 10)
# SugarCrepe's seven kinds of hard negative, in the order of its tables.
KINDS = ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att", "add_obj", "add_att")
# The three columns of the paper's table: the mean over the kinds that change the same thing.
GROUPS = {
    "obj": ("replace_obj", "swap_obj", "add_obj"),
    "att": ("replace_att", "swap_att", "add_att"),
    "rel": ("replace_rel",),
}
# How well a set A of regions fits a phrase: the cosine of r_A (Eq. 1) with the phrase, the mean or the sum over A of q.
SetScore = Literal["cosine", "mean", "sum", "relative"]
_TIE = 1e-6  # scores of sets that are closer than float32 rounds are equal
_BLOCK = 2_000  # boxes whose masks are made at once: 100 MB on a grid of 64 × 64


# ---- retrieval -------------------------------------------------------------------------------------------------------


def recall(images: Tensor, captions: Tensor, image_of_caption: Tensor | None = None) -> Metrics:
    """Recall at 1, 5 and 10 in both directions, and the mean of the six.

    *Text retrieval* queries with an image and hits when any of its captions is among the k best; *image retrieval*
    queries with a caption and hits when its image is among them.

    Args:
        images: normalised embeddings [n, D].
        captions: normalised embeddings [captions, D].
        image_of_caption: index of each caption's image [captions]; without it, caption i belongs to image i.
    """
    if image_of_caption is None:
        image_of_caption = torch.arange(len(captions), device=captions.device)
    return _recalls(text_ranks(images, captions, image_of_caption), image_ranks(images, captions, image_of_caption))


def recall_of_scores(to_text: Tensor, to_image: Tensor, image_of_caption: Tensor) -> Metrics:
    """`recall` from scores [n, captions] of all pairs: those of an image's query and those of a caption's."""
    matches = image_of_caption == torch.arange(len(to_text))[:, None]
    return _recalls(_text_ranks(to_text, matches), label_ranks(to_image.T, image_of_caption))


def _recalls(text: Tensor, image: Tensor) -> Metrics:
    """The recalls of ranks [n] of captions and [captions] of images."""
    ranks = {"image": image, "text": text}
    recalls = {
        f"{side}_retrieval_recall@{k}": (rank < k).double().mean().item()
        for side, rank in ranks.items()
        for k in CUTOFFS
    }
    return {**recalls, "mean_recall": sum(recalls.values()) / len(recalls)}


def text_ranks(images: Tensor, captions: Tensor, image_of_caption: Tensor, block: int = 1024) -> Tensor:
    """For each image, how many captions of other images come before the best of its own: [n].

    `block` images are scored at once, the bound on memory; the other arguments are those of `recall`.
    """
    _check_captions(images, captions, image_of_caption)
    ranks = []
    for start in range(0, len(images), block):
        scores = images[start : start + block] @ captions.T
        rows = torch.arange(start, start + len(scores), device=images.device)
        ranks.append(_text_ranks(scores, image_of_caption == rows[:, None]))
    return torch.cat(ranks)


def _text_ranks(scores: Tensor, matches: Tensor) -> Tensor:
    """How many of each row's scores [rows, captions] come before the best of its matches: [rows]."""
    best = scores.masked_fill(~matches, -torch.inf).amax(1, keepdim=True)
    # `not less` instead of `greater or equal`: true for NaN.
    return (~(scores < best) & ~matches).sum(1)


def image_ranks(images: Tensor, captions: Tensor, image_of_caption: Tensor, block: int = 1024) -> Tensor:
    """For each caption, how many other images come before its own: [captions]. Arguments as in `text_ranks`."""
    _check_captions(images, captions, image_of_caption)
    return torch.cat(
        [
            label_ranks(captions[start : start + block] @ images.T, image_of_caption[start : start + block])
            for start in range(0, len(captions), block)
        ]
    )


def _check_captions(images: Tensor, captions: Tensor, image_of_caption: Tensor) -> None:
    if image_of_caption.shape != (len(captions),):
        raise ValueError(f"{len(captions)} captions, but image_of_caption is {tuple(image_of_caption.shape)}")
    covered = torch.bincount(image_of_caption, minlength=len(images))
    if len(covered) > len(images):
        raise ValueError(f"a caption points to image {len(covered) - 1}, but there are {len(images)} images")
    if (covered == 0).any():
        raise ValueError(f"image {int((covered == 0).nonzero()[0])} has no caption: leave it out")


# ---- classification --------------------------------------------------------------------------------------------------


def class_embeddings(encode: Callable[[list[str]], Tensor], names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """One direction for each class [classes, D]: its prompts normalised, averaged, normalised again.

    Args:
        encode: embeds a list of texts, [texts, D].
        names: the class names.
        templates: sentences with `{c}` where the class name goes, as clip-benchmark writes them.

    Raises:
        UserError: there is no class or no template, or a template has no place for the name.
    """
    prompts = encode(class_prompts(names, templates))
    return normalize(normalize(prompts, dim=-1).unflatten(0, (len(names), len(templates))).mean(1), dim=-1)


def class_prompts(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """The prompts of each class, one for each template. Raises as `class_embeddings` does."""
    if not names or not templates:
        raise UserError("zero-shot classification needs at least one class name and one template")
    missing = [template for template in templates if "{c}" not in template]
    if missing:
        raise UserError(f"template {missing[0]!r} has no {{c}} for the class name")
    return [template.replace("{c}", name) for name in names for template in templates]


def label_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """For each row of scores [n, classes], how many others come before its label [n]: [n]."""
    column = labels[:, None]
    ahead = ~(scores < scores.gather(1, column))  # true for NaN
    return ahead.sum(1) - ahead.gather(1, column)[:, 0].long()


def classification_of(scores: Tensor, labels: Tensor) -> Metrics:
    """`classification` of labels [n], mean average precision of labels [n, classes]."""
    if labels.ndim == 2:
        return {"mean_average_precision": mean_average_precision(scores, labels)}
    return classification(scores, labels)


def classification(scores: Tensor, labels: Tensor) -> Metrics:
    """Accuracies of scores [n, classes] and labels [n].

    Top-5 needs five classes; the mean of recalls is over the classes that occur.
    """
    classes, ranks = scores.shape[1], label_ranks(scores, labels)
    hits = (scores.argmax(1) == labels).double()
    present = torch.bincount(labels, minlength=classes).double()
    recalls = torch.bincount(labels, weights=hits, minlength=classes)[present > 0] / present[present > 0]
    return {
        "acc1": (ranks < 1).double().mean().item(),
        "acc5": (ranks < 5).double().mean().item() if classes >= 5 else None,
        "mean_per_class_recall": recalls.mean().item(),
    }


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Over classes, of scores and labels [n, classes]; a class without an image counts as 0, as in clip-benchmark."""
    truth = labels.gather(0, scores.argsort(dim=0, descending=True)).double()
    precision = truth.cumsum(0) / torch.arange(1, len(truth) + 1)[:, None]
    return ((precision * truth).sum(0) / truth.sum(0).clamp(min=1)).mean().item()


# ---- composition -----------------------------------------------------------------------------------------------------


def prefers_caption(images: Tensor, captions: Tensor, negatives: Tensor) -> Tensor:
    """Whether an image scores its caption strictly higher than the negative: [items] bool from three [items, D]."""
    return (images * captions).sum(-1) > (images * negatives).sum(-1)


def accuracy_by_kind(preferred: Tensor, kinds: Sequence[str]) -> dict[str, float]:
    """Share of preferred captions [items] for each kind that occurs, `KINDS` first and in order."""
    if len(kinds) != len(preferred):
        raise ValueError(f"{len(preferred)} items, but {len(kinds)} kinds")
    outcomes: dict[str, list[bool]] = {}
    for kind, hit in zip(kinds, preferred.tolist(), strict=True):
        outcomes.setdefault(kind, []).append(hit)
    order = [kind for kind in KINDS if kind in outcomes] + sorted(set(outcomes) - set(KINDS))
    return {kind: sum(outcomes[kind]) / len(outcomes[kind]) for kind in order}


def hard_negatives(preferred: Tensor, kinds: Sequence[str]) -> dict[str, Metrics]:
    """Accuracy of all items [items], part "", with its standard error, and of each kind.

    A kind has clip-benchmark's three names; of one image, the image accuracy is 1 by definition.
    """
    by_kind = accuracy_by_kind(preferred, kinds)
    accuracy = preferred.double().mean().item()
    parts: dict[str, Metrics] = {
        "": {
            "acc": accuracy,
            "mean_kind_acc": sum(by_kind.values()) / len(by_kind),
            "acc_standard_error": math.sqrt(accuracy * (1 - accuracy) / len(preferred)),
        }
    }
    return parts | {kind: {"image_acc": 1.0, "text_acc": value, "acc": value} for kind, value in by_kind.items()}


def caption_pairs(scores: Tensor, to_image: Tensor | None = None) -> Metrics:
    """Winoground's three scores of [items, 2 images, 2 captions]; a caption's query may have scores of its own."""
    to_image = scores if to_image is None else to_image
    text = (scores[:, 0, 0] > scores[:, 0, 1]) & (scores[:, 1, 1] > scores[:, 1, 0])
    image = (to_image[:, 0, 0] > to_image[:, 1, 0]) & (to_image[:, 1, 1] > to_image[:, 0, 1])
    values = {"image_acc": image, "text_acc": text, "acc": image & text}
    return {name: hits.double().mean().item() for name, hits in values.items()}


# ---- the pointing game -----------------------------------------------------------------------------------------------


def patch_similarity(patches: Tensor, query: Tensor) -> Tensor:
    """Cosine of every patch [..., N, D] with a query [..., D]: [..., N]."""
    return (normalize(patches.float(), dim=-1) @ normalize(query.float(), dim=-1).unsqueeze(-1)).squeeze(-1)


def cells_in_boxes(boxes: Tensor, grid: tuple[int, int]) -> Tensor:
    """Which patches of the grid have their centre in each box [T, 4]: [T, rows, columns] bool.

    A box is (x0, y0, x1, y1) in shares of the image. A patch is a point, its centre: the maximum of the bilinearly
    enlarged heatmap lies there too, so nothing is enlarged.
    """
    rows, columns = grid
    y = (torch.arange(rows, device=boxes.device, dtype=boxes.dtype) + 0.5) / rows
    x = (torch.arange(columns, device=boxes.device, dtype=boxes.dtype) + 0.5) / columns
    x0, y0, x1, y1 = (side[:, None] for side in boxes.unbind(1))
    inside_y = (y >= y0) & (y <= y1)
    inside_x = (x >= x0) & (x <= x1)
    return inside_y[:, :, None] & inside_x[:, None, :]


def hits_cells(heatmaps: Tensor, inside: Tensor) -> Tensor:
    """Whether the maximum of each heatmap [T, rows, columns] is one of its patches `inside`: [T] bool.

    When several patches share the maximum, all must be; so a constant heatmap points nowhere. A heatmap with NaN is a
    miss.
    """
    highest = heatmaps.flatten(1).amax(1)
    top = heatmaps == highest[:, None, None]
    return ~(top & ~inside).flatten(1).any(1) & highest.isfinite()


def best_fixed_patch(inside: Tensor) -> float:
    """Share of phrases whose boxes hold one and the same patch, the best of all: from [T, rows, columns] bool.

    What a map gets that neither looks at the image nor reads the phrase.
    """
    return inside.flatten(1).double().mean(0).max().item()


def phrases_of_other_images(image_of_phrase: Tensor) -> Tensor | None:
    """For each phrase [T] the number of one that belongs to another image, each of them once: [T].

    None where one image has more than half of all phrases: then there is no such order.
    """
    by_image = image_of_phrase.argsort(stable=True)
    other = torch.empty_like(by_image)
    other[by_image] = by_image.roll(-(len(by_image) // 2))
    return None if (image_of_phrase[other] == image_of_phrase).any() else other


def relative_maps(maps: Tensor, image_of_phrase: Tensor) -> Tensor:
    """Maps [T, rows, columns] less the mean map of all phrases of their image: what tells a phrase from the others.

    Patches that prefer every phrase do not show in them. A phrase that is its image's only one keeps its map.
    """
    images = int(image_of_phrase.max()) + 1
    counts = torch.bincount(image_of_phrase, minlength=images)
    sums = torch.zeros(images, *maps.shape[1:]).index_add_(0, image_of_phrase, maps)
    means = torch.where((counts > 1)[:, None, None], sums / counts.clamp(min=1)[:, None, None], 0.0)
    return maps - means[image_of_phrase]


def share_inside(maps: Tensor, inside: Tensor) -> Tensor:
    """Share of the positive part of each map [T, N] that lies in the patches `inside` [N] bool: [T] in float64.

    A map without a positive patch has none anywhere.
    """
    positive = maps.double().clamp(min=0)
    # NaN is no response.
    positive = torch.where(positive.isfinite(), positive, 0)
    return positive[:, inside].sum(1) / positive.sum(1).clamp(min=1e-12)


# ---- swap accuracy ---------------------------------------------------------------------------------------------------


def box_masks(boxes: Tensor, grid: tuple[int, int]) -> Tensor:
    """The patches of each box [T, 4]: [T, rows, columns] bool, at least one of each.

    They are those of `cells_in_boxes`; a box between the centres has the patch that it overlaps most.
    """
    inside = cells_in_boxes(boxes, grid)
    x0, y0, x1, y1 = boxes.unbind(1)
    shared = _overlaps(y0, y1, grid[0])[:, :, None] * _overlaps(x0, x1, grid[1])[:, None, :]
    most = torch.zeros_like(inside).flatten(1)
    most.scatter_(1, shared.flatten(1).argmax(1, keepdim=True), True)
    is_between = ~inside.flatten(1).any(1)
    return torch.where(is_between[:, None, None], most.view_as(inside), inside)


def union_masks(
    boxes: Sequence[Sequence[tuple[float, float, float, float]]],
    grid: tuple[int, int],
    masks_of: Callable[[Tensor, tuple[int, int]], Tensor] = box_masks,
) -> Tensor:
    """The patches of all boxes of each phrase [T, rows, columns] bool, by the masks of single boxes."""
    union = torch.zeros(len(boxes), *grid, dtype=torch.bool)
    # The first boxes of all phrases at once, in blocks that bound the memory, then the second ones, …
    for number in range(max(map(len, boxes), default=0)):
        rows = torch.tensor([row for row, several in enumerate(boxes) if len(several) > number])
        for block in rows.split(_BLOCK):
            union[block] |= masks_of(torch.tensor([boxes[row][number] for row in block.tolist()]), grid)
    return union


def _overlaps(low: Tensor, high: Tensor, cells: int) -> Tensor:
    """How long the interval from `low` to `high` [T] is within each of the cells of the unit interval: [T, cells]."""
    edges = torch.arange(cells + 1, device=low.device, dtype=low.dtype) / cells
    return (torch.minimum(high[:, None], edges[1:]) - torch.maximum(low[:, None], edges[:-1])).clamp(min=0)


def mask_overlaps(masks: Tensor) -> Tensor:
    """Intersection over union of all pairs of masks [T, rows, columns]: [T, T]."""
    flat = masks.flatten(1).double()
    shared, sizes = flat @ flat.T, flat.sum(1)
    return shared / (sizes[:, None] + sizes - shared)


def distances_to_middle(masks: Tensor) -> Tensor:
    """Mean distance of the cells of each mask [T, rows, columns] to the middle, in shares of the sides: [T]."""
    rows, columns = (
        (torch.arange(cells, device=masks.device).double() + 0.5) / cells - 0.5 for cells in masks.shape[1:]
    )
    return mean_inside(torch.hypot(rows[:, None], columns[None, :]).expand(masks.shape), masks)


def mean_inside(maps: Tensor, masks: Tensor) -> Tensor:
    """Mean of each map over the patches of its mask, both [T, rows, columns]: [T] in float64."""
    return torch.where(masks, maps.double(), 0).flatten(1).sum(1) / masks.flatten(1).sum(1)


def swap_hits(maps: Tensor, masks: Tensor, pairs: Tensor) -> Tensor:
    """Whether two phrases prefer their own boxes to each other's: [pairs], 1 for a hit, 0.5 for a tie.

    A hit is S(a, box a) + S(b, box b) > S(a, box b) + S(b, box a), S the mean of a phrase's map in the boxes. A map
    that ignores its phrase ties in each pair.

    Args:
        maps: of all phrases [T, rows, columns].
        masks: their boxes, likewise, bool.
        pairs: numbers of two phrases of one image [pairs, 2].
    """
    a, b = pairs.unbind(1)
    own = mean_inside(maps[a], masks[a]) + mean_inside(maps[b], masks[b])
    swapped = mean_inside(maps[a], masks[b]) + mean_inside(maps[b], masks[a])
    return (own > swapped).double() + 0.5 * (own == swapped)


def mask_differences(masks: Tensor, pairs: Tensor) -> Tensor:
    """How much more of the first phrase's boxes than of the second's lies in each cell: [pairs, cells] in float64.

    The margin of two fixed maps, one for the first and one for the second phrase of a pair, is a linear function of it.
    """
    shares = masks.flatten(1).double()
    shares = shares / shares.sum(1, keepdim=True)
    return shares[pairs[:, 0]] - shares[pairs[:, 1]]


def swap_hits_of_bias(differences: Tensor) -> Tensor:
    """Hits of fixed maps that know only which phrase of a pair is which: [pairs], 1 for a hit, 0.5 for a tie.

    The maps say where the boxes of first and of second phrases usually lie in the other pairs, whose differences are
    given [pairs, cells]. So this is what a model reaches that reads nothing of a phrase but its place in the sentence.
    """
    margin = ((differences.sum(0) - differences) * differences).sum(1)
    return (margin > 0).double() + 0.5 * (margin == 0)


def balancing_weights(features: Tensor, ridge: float = 1e-4, steps: int = 50) -> Tensor:
    """Weights [rows] that sum to one, are as equal as can be, and make the mean of each feature [rows, F] about zero.

    They are of the largest entropy: softmax(features · θ), θ the minimum of log Σ exp(features · θ) + ridge |θ|², which
    Newton's method finds. The ridge keeps them finite where no weights could balance a feature.
    """
    theta = torch.zeros(features.shape[1], dtype=torch.double)
    eye = torch.eye(features.shape[1], dtype=torch.double)
    value = torch.logsumexp(features @ theta, 0)
    for _ in range(steps):
        weights = torch.softmax(features @ theta, 0)
        mean = weights @ features
        curvature = features.T @ (weights[:, None] * features) - torch.outer(mean, mean) + 2 * ridge * eye
        step = torch.linalg.solve(curvature, mean + 2 * ridge * theta)
        # A full step may go too far while the weights are still uneven: it is halved until it helps.
        for _ in range(steps):
            tried = torch.logsumexp(features @ (theta - step), 0) + ridge * (theta - step).square().sum()
            if tried <= value:
                break
            step = step / 2
        theta, value = theta - step, tried
        if step.abs().max() < 1e-9:
            break
    return torch.softmax(features @ theta, 0)


# ---- set accuracy ----------------------------------------------------------------------------------------------------


def set_f1(q: Tensor, gram: Tensor, gold: Tensor, score: SetScore = "cosine") -> Tensor:
    """F1 of each phrase's best set of an image's regions, T2R's argmax, with its gold set: [T]; 1 is an exact match.

    All sets but the empty one are enumerated. By the sum, the best set holds the regions with q > 0, or the best one
    where there are none; by the mean it is one region; `relative` is the sum of `relative_similarities`. Where several
    sets are the best, the worst of them counts.

    Args:
        q: ⟨φ_m, p_B⟩ of phrases with the regions [T, M].
        gram: ⟨φ_m, φ_m'⟩ of the regions [M, M].
        gold: which regions a phrase names [T, M] bool.
        score: how well a set fits.
    """
    sets = subset_matrix(q.shape[1], empty=False, device=q.device).double()
    q = relative_similarities(q.double()) if score == "relative" else q.double()
    scores, sizes, members = q @ sets.T, sets.sum(1), gold.double()
    if score == "mean":
        scores = scores / sizes
    elif score == "cosine":
        scores = scores / ((sets @ gram.double()) * sets).sum(1).clamp(min=1e-12).sqrt()
    f1 = 2 * (members @ sets.T) / (members.sum(1, keepdim=True) + sizes)
    is_best = ~(scores < scores.amax(1, keepdim=True) - _TIE)  # true for NaN
    return f1.masked_fill(~is_best, torch.inf).amin(1)


def relative_similarities(q: Tensor) -> Tensor:
    """Similarities [T, M] of an image's phrases with its regions, less what each region and each phrase has anyway.

    What is left of a region is positive where the phrase prefers it more than the image's other phrases do, and more
    than it prefers the image's other regions. The only phrase of an image is compared with no other.
    """
    q = q - q.mean(0) if len(q) > 1 else q
    return q - q.mean(1, keepdim=True)
