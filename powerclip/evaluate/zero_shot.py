"""Zero-shot classification: a class is the mean of its prompts, an image takes the nearest class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import normalize

from powerclip.errors import UserError


def class_embeddings(encode: Callable[[list[str]], Tensor], names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """One direction per class [classes, D]: prompts normalised, averaged, normalised again.

    Args:
        encode: embeds a list of captions, [captions, D].
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


def accuracy(images: Tensor, classes: Tensor, labels: Tensor, cutoffs: Sequence[int] = (1, 5)) -> dict[int, float]:
    """Share of images whose class is among the k nearest, for each k.

    Args:
        images: normalised embeddings [images, D].
        classes: normalised embeddings [classes, D].
        labels: the right class of each image [images].
        cutoffs: the values of k.
    """
    return top_accuracy(images @ classes.T, labels, cutoffs)


def top_accuracy(scores: Tensor, labels: Tensor, cutoffs: Sequence[int] = (1, 5)) -> dict[int, float]:
    """Share of rows of scores [images, classes] whose label is among the k highest. Ties and NaN are misses."""
    own = labels[:, None]
    ahead = ~(scores < scores.gather(1, own))
    ranks = ahead.sum(1) - ahead.gather(1, own)[:, 0].long()
    return {k: (ranks < k).double().mean().item() for k in cutoffs}
