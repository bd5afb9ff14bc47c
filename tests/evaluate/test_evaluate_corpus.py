"""Retrieval on a corpus: whole images and all captions, and a model that sees colours finds them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from powerclip.data.corpus import read_corpus
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import build
from powerclip.evaluate.corpus import evaluate_corpus
from powerclip.evaluate.embeddings import embed_images, embed_texts

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return build(config=CONFIG)


@pytest.fixture(scope="module")
def tokenizer():
    return CaptionTokenizer(context_length=40)


class Seer(torch.nn.Module):
    """Embeds an image by its mean colour, and a caption by the mean colour of the image that it belongs to."""

    image_size = (16, 16)

    def __init__(self, colours: dict[tuple[int, ...], torch.Tensor]):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.colours = colours
        self.clip = torch.nn.Module()
        self.clip.visual = torch.nn.Module()
        self.clip.visual.preprocess_cfg = {"mean": CLIP_MEAN, "std": CLIP_STD}

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        assert not self.training
        assert images.shape[-2:] == self.image_size
        return normalize(images.mean((2, 3)), dim=-1)

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = [self.colours[tuple(id for id in row.tolist() if id)] for row in tokens]
        return normalize(torch.stack(rows), dim=-1)


def test_a_model_that_knows_every_images_colour_finds_all(mini_corpus, tokenizer):
    corpus = read_corpus([mini_corpus / "val-000.tar"], 20)
    mean, std = torch.tensor(CLIP_MEAN), torch.tensor(CLIP_STD)
    colours = {
        tuple(tokenizer.encode(caption).ids): (corpus.images[owner, :, 0, 0] / 255 - mean) / std
        for caption, owner in zip(corpus.captions, corpus.image_of_caption.tolist(), strict=True)
    }
    seer = Seer(colours)
    found = evaluate_corpus(seer, tokenizer, corpus)
    assert found.mean == 1.0
    assert seer.training  # as it was before


def test_embeddings_are_the_encoders_own_whatever_the_batch(encoder, tokenizer, monkeypatch):
    texts = ["a dog", "a red square on a wall", "two cats and a very long tail", "a"]
    images = torch.randint(0, 256, (4, 3, 40, 50), generator=torch.Generator().manual_seed(0)).byte()
    with torch.inference_mode():
        encoder.eval()
        whole = embed_texts(encoder, tokenizer, texts), embed_images(encoder, images)
        monkeypatch.setattr("powerclip.evaluate.embeddings.BATCH", 3)
        parts = embed_texts(encoder, tokenizer, texts), embed_images(encoder, images)
        direct = encoder.encode_text(tokenizer.pad([tokenizer.encode(text).ids for text in texts], full=True))
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(whole[0], direct, atol=1e-5)


def test_an_untrained_model_is_near_chance_on_photographs(real_data, encoder, tokenizer):
    corpus = read_corpus([real_data / "captions10k" / "val-000.tar"], 36)
    found = evaluate_corpus(encoder, tokenizer, corpus)
    assert found.image[10] < 0.05
    assert found.text[10] < 0.05
