"""Metrics of the benchmarks: pure functions of embeddings, scores and boxes, by the names that clip-benchmark has.

Ties count against the model, and so does NaN: a collapsed model must not look perfect.

Axes: n images · T phrases · N patches · D width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

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
    ranks = {
        "image": image_ranks(images, captions, image_of_caption),
        "text": text_ranks(images, captions, image_of_caption),
    }
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
        matches = image_of_caption == rows[:, None]
        best = scores.masked_fill(~matches, -torch.inf).amax(1, keepdim=True)
        # `not less` instead of `greater or equal`: true for NaN.
        ranks.append((~(scores < best) & ~matches).sum(1))
    return torch.cat(ranks)


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
    if not names or not templates:
        raise UserError("zero-shot classification needs at least one class name and one template")
    missing = [template for template in templates if "{c}" not in template]
    if missing:
        raise UserError(f"template {missing[0]!r} has no {{c}} for the class name")
    prompts = encode([template.replace("{c}", name) for name in names for template in templates])
    return normalize(normalize(prompts, dim=-1).unflatten(0, (len(names), len(templates))).mean(1), dim=-1)


def label_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """For each row of scores [n, classes], how many others come before its label [n]: [n]."""
    column = labels[:, None]
    ahead = ~(scores < scores.gather(1, column))  # true for NaN
    return ahead.sum(1) - ahead.gather(1, column)[:, 0].long()


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


def caption_pairs(scores: Tensor) -> Metrics:
    """Winoground's three scores of [items, 2 images, 2 captions]."""
    text = (scores[:, 0, 0] > scores[:, 0, 1]) & (scores[:, 1, 1] > scores[:, 1, 0])
    image = (scores[:, 0, 0] > scores[:, 1, 0]) & (scores[:, 1, 1] > scores[:, 0, 1])
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
