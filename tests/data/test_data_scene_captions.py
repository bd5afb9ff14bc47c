"""Captions of scenes packed from their words are those packed from their texts."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from powerclip.data.scene_captions import PackedCaptions, SceneCaptions
from powerclip.data.scenes import SPLITS, scene_batch
from powerclip.data.tokens import CaptionTokenizer, pack_phrases


@pytest.fixture(scope="module")
def tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer()


def packed_texts(tokenizer, scenes, nodes: str, multiple: int = 1) -> PackedCaptions:
    captions = [tokenizer.encode(scene.caption) for scene in scenes]
    tokens = tokenizer.pad([caption.ids for caption in captions], multiple=multiple)
    phrases = pack_phrases([scene.tree for scene in scenes], captions, tokens.shape[1], nodes)
    return PackedCaptions(tokens, tuple(map(len, captions)), phrases)


def assert_same(one: PackedCaptions, other: PackedCaptions) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert one.lengths == other.lengths
    for part in fields(one.phrases):
        a, b = getattr(one.phrases, part.name), getattr(other.phrases, part.name)
        assert (a.dtype == b.dtype and torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b, part.name


@pytest.mark.parametrize("nodes", ["phrases", "all"])
@pytest.mark.parametrize("split", SPLITS)
def test_words_give_the_tokens_and_phrases_of_the_text(tokenizer, split, nodes):
    scenes = scene_batch(range(500), 5, split)
    assert_same(SceneCaptions(tokenizer, nodes, 16).pack(scenes), packed_texts(tokenizer, scenes, nodes, 16))


def test_captions_that_the_context_length_cuts_are_packed_as_texts():
    tokenizer = CaptionTokenizer(context_length=18)
    scenes = scene_batch(range(60), 0)
    packed = SceneCaptions(tokenizer).pack(scenes)
    assert max(packed.lengths) == 18
    assert_same(packed, packed_texts(tokenizer, scenes, "phrases"))


def test_another_batch_of_the_same_scenes_has_the_same_captions(tokenizer):
    captions, scenes = SceneCaptions(tokenizer), scene_batch(range(20), 0)
    captions.pack(scene_batch(range(40), 1, "collective"))
    assert_same(captions.pack(scenes), SceneCaptions(tokenizer).pack(scenes))
