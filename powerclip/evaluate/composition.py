"""Compositionality, SugarCrepe's way: is an image's caption preferred to a false one that is nearly the same?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

# SugarCrepe's seven kinds of hard negative, in the order of its tables.
KINDS = ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att", "add_obj", "add_att")
# The three columns of the paper's table: the mean over the kinds that change the same thing.
GROUPS = {
    "obj": ("replace_obj", "swap_obj", "add_obj"),
    "att": ("replace_att", "swap_att", "add_att"),
    "rel": ("replace_rel",),
}


def prefers_caption(images: Tensor, captions: Tensor, negatives: Tensor) -> Tensor:
    """Whether the caption scores strictly higher than its negative: [pairs] bool from three [pairs, D].

    A draw is a miss: a model that cannot tell the two apart has not understood the difference.
    """
    return (images * captions).sum(-1) > (images * negatives).sum(-1)


def accuracy_by_kind(preferred: Tensor, kinds: Sequence[str]) -> dict[str, float]:
    """Share of preferred captions [pairs] for each kind that occurs, `KINDS` first and in order."""
    if len(kinds) != len(preferred):
        raise ValueError(f"{len(preferred)} pairs, but {len(kinds)} kinds")
    outcomes: dict[str, list[bool]] = {}
    for kind, hit in zip(kinds, preferred.tolist(), strict=True):
        outcomes.setdefault(kind, []).append(hit)
    order = [kind for kind in KINDS if kind in outcomes] + sorted(set(outcomes) - set(KINDS))
    return {kind: sum(outcomes[kind]) / len(outcomes[kind]) for kind in order}


def group_means(by_kind: Mapping[str, float]) -> dict[str, float]:
    """The paper's Obj, Att and Rel: the unweighted mean of the kinds of each group that were measured."""
    means = {}
    for group, kinds in GROUPS.items():
        measured = [by_kind[kind] for kind in kinds if kind in by_kind]
        if measured:
            means[group] = sum(measured) / len(measured)
    return means
