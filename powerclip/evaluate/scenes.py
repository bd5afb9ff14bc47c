"""Everything that is measured on the embedded scenes: retrieval, zero-shot, composition and the pointing game."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from powerclip.data import scenes as data
from powerclip.data.tokens import CaptionTokenizer
from powerclip.data.trees import Tree
from powerclip.evaluate import composition, pointing, retrieval, zero_shot
from powerclip.evaluate.embeddings import BATCH, embed_texts, evaluating
from powerclip.evaluate.heatmap import patch_similarity, word_queries

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

TEMPLATES = ("{c}", "a picture of {c}", "there is {c}")  # the class name brings its article


@dataclass(frozen=True)
class SceneResults:
    """Shares of right answers (0 to 1), and what random answers would give."""

    retrieval: retrieval.Retrieval
    zero_shot: dict[int, float]  # top k → accuracy
    composition: dict[str, float]  # kind of hard negative → accuracy
    pointing: dict[str, float]  # kind of query, "words" or "text" → accuracy
    pointing_any: dict[str, float]  # the same, but any object of the picture will do
    chance: float  # of the pointing game
    chance_any: float
    counts: dict[str, int]  # how many scenes, pictures, classes, comparisons and phrases were looked at

    @property
    def composition_mean(self) -> float:
        """The unweighted mean over the kinds."""
        return sum(self.composition.values()) / len(self.composition)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the means are written out as well."""
        return {
            **asdict(self),
            "composition_mean": self.composition_mean,
            "composition_groups": composition.group_means(self.composition),
        }


def evaluate_scenes(
    encoder: DualEncoder,
    tokenizer: CaptionTokenizer,
    *,
    count: int = 1000,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> SceneResults:
    """Evaluate on `count` scenes of the test split (composition and pointing: the first half of them)."""
    encoder.to(device)
    with evaluating(encoder):
        return _evaluate(encoder, tokenizer, count, seed, torch.device(device))


def _evaluate(
    encoder: DualEncoder, tokenizer: CaptionTokenizer, count: int, seed: int, device: torch.device
) -> SceneResults:
    scenes = data.test_scenes(count, seed)
    images, patches = _encode_images(encoder, scenes, device)
    captions = embed_texts(encoder, tokenizer, [scene.caption for scene in scenes])
    half = scenes[: (count + 1) // 2]
    by_kind, comparisons = _composition(encoder, tokenizer, half, images, captions)
    accuracy, pictures, classes = _zero_shot(encoder, tokenizer, count // 2, seed, device)
    game = _pointing(encoder, tokenizer, half, patches)
    return SceneResults(
        retrieval=retrieval.recall(images, captions),
        zero_shot=accuracy,
        composition=by_kind,
        pointing=game.own,
        pointing_any=game.any,
        chance=game.chance,
        chance_any=game.chance_any,
        counts={
            "retrieval": len(scenes),
            "zero_shot": pictures,
            "classes": classes,
            "composition": comparisons,
            "pointing": game.phrases,
        },
    )


def scene_images(encoder: DualEncoder, scenes: Sequence[data.Scene]) -> Tensor:
    """The scenes drawn at the encoder's size and normalised as it wants them: [C, 3, H, W] on the CPU."""
    wants = encoder.clip.visual.preprocess_cfg
    mean, std = (torch.tensor(wants[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (data.render(scenes, encoder.image_size[0]).float() / 255 - mean) / std


def _encode_images(encoder: DualEncoder, scenes: Sequence[data.Scene], device: torch.device) -> tuple[Tensor, Tensor]:
    encoded = [
        encoder.encode_patches(scene_images(encoder, scenes[start : start + BATCH]).to(device))
        for start in range(0, len(scenes), BATCH)
    ]
    return torch.cat([image for image, _ in encoded]), torch.cat([patches for _, patches in encoded])


def _zero_shot(
    encoder: DualEncoder, tokenizer: CaptionTokenizer, count: int, seed: int, device: torch.device
) -> tuple[dict[int, float], int, int]:
    scenes = data.scene_batch(range(count), seed, "zero_shot")
    images, _ = _encode_images(encoder, scenes, device)
    names = [f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in data.zero_shot_classes()]
    classes = zero_shot.class_embeddings(lambda texts: embed_texts(encoder, tokenizer, texts), names, TEMPLATES)
    labels = torch.tensor([data.zero_shot_label(scene) for scene in scenes], device=device)
    return zero_shot.accuracy(images, classes, labels), count, len(names)


def _composition(
    encoder: DualEncoder,
    tokenizer: CaptionTokenizer,
    scenes: Sequence[data.Scene],
    images: Tensor,
    captions: Tensor,
) -> tuple[dict[str, float], int]:
    """Accuracy by kind; `images` and `captions` begin with the embeddings of `scenes`."""
    pairs = [(k, kind, text) for k, scene in enumerate(scenes) for kind, text in data.hard_negatives(scene).items()]
    which = torch.tensor([k for k, _, _ in pairs], device=images.device)
    negatives = embed_texts(encoder, tokenizer, [text for _, _, text in pairs])
    preferred = composition.prefers_caption(images[which], captions[which], negatives)
    return composition.accuracy_by_kind(preferred, [kind for _, kind, _ in pairs]), len(pairs)


@dataclass(frozen=True)
class _Game:
    own: dict[str, float]  # kind of query → how often the maximum lies on the object that the phrase names
    any: dict[str, float]  # kind of query → how often it lies on some object
    chance: float
    chance_any: float
    phrases: int


def _pointing(
    encoder: DualEncoder, tokenizer: CaptionTokenizer, scenes: Sequence[data.Scene], patches: Tensor
) -> _Game:
    """The pointing game; `patches` begin with those of `scenes`."""
    phrases = [(k, span, box) for k, scene in enumerate(scenes) for span, box in scene.phrase_boxes]
    boxes = torch.tensor([box for _, _, box in phrases], device=patches.device)
    queries = {
        "words": torch.cat(
            [
                word_queries(
                    encoder,
                    tokenizer,
                    [scene.caption for scene in scenes[start : start + BATCH]],
                    [
                        Tree(scene.tree.leaves, tuple(span for span, _ in scene.phrase_boxes))
                        for scene in scenes[start : start + BATCH]
                    ],
                )
                for start in range(0, len(scenes), BATCH)
            ]
        ),
        "text": embed_texts(encoder, tokenizer, [scenes[k].caption[span.start : span.end] for k, span, _ in phrases]),
    }
    which = torch.tensor([k for k, _, _ in phrases], device=patches.device)
    inside = pointing.cells_in_boxes(boxes, encoder.grid)
    objects = [torch.tensor([thing.box for thing in scene.objects], device=patches.device) for scene in scenes]
    occupied = torch.stack([pointing.cells_in_boxes(own, encoder.grid).any(0) for own in objects])[which]
    own, some = {}, {}
    for name, query in queries.items():
        heatmaps = patch_similarity(patches[which], query).unflatten(1, encoder.grid)
        own[name] = pointing.hits_cells(heatmaps, inside).double().mean().item()
        some[name] = pointing.hits_cells(heatmaps, occupied).double().mean().item()
    return _Game(own, some, inside.double().mean().item(), occupied.double().mean().item(), len(phrases))
