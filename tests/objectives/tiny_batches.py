"""Small batches, towers and features for the tests of objectives."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import normalize

from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.scene_loader import SceneLoader
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, Features, build
from powerclip.objectives import Objective, Plan, Terms
from powerclip.train.towers import Towers

CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
GRID = (8, 8)  # of larger_encoder


@cache
def tiny_loader(count: int) -> SceneLoader:
    spec = BatchSpec(image_size=(32, 32), grid=(4, 4), batch_size=count, regions=5)
    return SceneLoader(spec, CaptionTokenizer(context_length=40))


@cache
def tiny_batch(count: int, step: int = 0) -> Batch:
    return tiny_loader(count).batch(step)


def tiny_encoder(seed: int = 0) -> DualEncoder:
    torch.manual_seed(seed)
    return build(config=CONFIG).train()


def encode(objective: Objective, encoder: DualEncoder, batch: Batch) -> Features:
    """The features of a batch as the objective's loss takes them."""
    return Towers(objective, encoder)(batch.images, batch.tokens)


def terms_of(objective: Objective, encoder: DualEncoder, batch: Batch) -> Terms:
    """The loss of a batch."""
    return objective.loss(encode(objective, encoder, batch), batch)


def larger_encoder(seed: int = 0) -> DualEncoder:
    """An encoder with GRID patches."""
    torch.manual_seed(seed)
    return build(config={**CONFIG, "vision_cfg": {**CONFIG["vision_cfg"], "image_size": 64}}).train()


def noise_images(count: int = 6) -> torch.Tensor:
    """Images for `larger_encoder`."""
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def planned(objective: Objective, images: torch.Tensor, encoder: DualEncoder | None = None) -> Plan:
    """What the objective does with images; the same is drawn each time."""
    return Towers(objective, encoder or larger_encoder()).plan(images, torch.Generator().manual_seed(0))


def visible(plan: Plan) -> list[set[int]]:
    """The patches that each image shows."""
    return [set(row[show].tolist()) for row, show in zip(plan.kept, plan.shown, strict=True)]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """Uniform numbers."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def features(count: int, seed: int = 0) -> Features:
    """Random features of `tiny_batch(count)`, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    length = tiny_batch(count).tokens.shape[1]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 8, generator=generator).requires_grad_()

    return Features(
        image=normalize(draw(count), dim=-1),
        patches=draw(count, 16),
        text=normalize(draw(count), dim=-1),
        words=draw(count, length),
        logit_scale=torch.tensor(14.3, requires_grad=True),
    )
