"""Masks that are the same region again."""

from __future__ import annotations

from torch import Tensor


def mask_iou(masks: Tensor) -> Tensor:
    """IoU of each mask [..., n, rows, columns] with each [..., n, n]."""
    flat = masks.flatten(-2).float()  # zeros, ones and their sums are exact, even where products are in TF32
    common = flat @ flat.mT
    area = flat.sum(-1)
    return common / (area.unsqueeze(-1) + area.unsqueeze(-2) - common).clamp(min=1)


def distinct(masks: Tensor, overlap: float, most: int) -> Tensor:
    """The first masks [n, rows, columns], at most `most`, that overlap no earlier one by an IoU above `overlap`."""
    same = (mask_iou(masks) > overlap).cpu().numpy()
    kept: list[int] = []
    for at in range(len(masks)):
        if len(kept) == most:
            break
        if not same[at, kept].any():
            kept.append(at)
    return masks[kept]
