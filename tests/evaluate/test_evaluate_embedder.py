"""The embedder: the model's own preprocessing, a live model left as it was, work that ranks and models share."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from benchmark_examples import caption_table, image, tiny_model
from PIL import Image
from torch.nn.functional import normalize

from powerclip.data.tokens import CaptionTokenizer
from powerclip.data.trees import parse_bracketed
from powerclip.encoders import build, preprocess_for
from powerclip.encoders.self_attention import use_packed_attention
from powerclip.errors import UserError
from powerclip.evaluate import embedder as embedding
from powerclip.evaluate.embedder import Embedder, PixelStore
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.readers import read_path
from powerclip.runtime.distributed import Ranks

CAPTION = "a dog sitting on a red chair"
TREE = parse_bracketed("(NP (NP a dog) (VP sitting (PP on (NP a red chair))))", CAPTION)
TEXTS = ["a dog", "a red square on a wall", "two cats and a very long tail", "a"]


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Images three times as wide as high."""
    folder = tmp_path_factory.mktemp("wide")
    return FileImages([image(folder / f"{number}.png", number, (90, 30)) for number in range(7)])


def squashing(model):
    """The same model, but one that squashes images."""
    encoder = copy.deepcopy(model[0])
    encoder.clip.visual.preprocess_cfg = {**encoder.clip.visual.preprocess_cfg, "resize_mode": "squash"}
    return encoder, model[1]


def patches_of(embedder, source):
    found = {}
    embedder.patches(source, lambda numbers, patches: found.update(zip(numbers, patches, strict=True)))
    assert list(found) == list(range(len(source.names)))
    return torch.stack(list(found.values()))


# ---- what is embedded ------------------------------------------------------------------------------------------------


def test_embeddings_are_the_encoders_own_whatever_the_batch(model, wide, monkeypatch):
    encoder, tokenizer = model
    whole = Embedder(*model).texts(TEXTS), Embedder(*model).images(wide).vectors
    monkeypatch.setattr(embedding, "BATCH", 3)
    parts = Embedder(*model).texts(TEXTS), Embedder(*model).images(wide).vectors
    prepare = preprocess_for(encoder)
    with torch.inference_mode():
        texts = encoder.encode_text(tokenizer.pad([tokenizer.encode(text).ids for text in TEXTS], full=True))
        images = encoder.encode_image(torch.stack([prepare(Image.open(path)) for path in wide.paths]))
    for one, other, direct in zip(whole, parts, (texts, images), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        assert torch.allclose(one, direct, atol=1e-5)


def test_global_embeddings_follow_the_models_own_preprocessing_and_patches_see_the_whole_image(model, wide):
    crops, squashes = Embedder(*model), Embedder(*squashing(model))
    assert not torch.allclose(crops.images(wide).vectors, squashes.images(wide).vectors, atol=1e-3)
    assert torch.equal(patches_of(crops, wide), patches_of(squashes, wide))


def test_patches_see_what_a_centre_crop_does_not(model, tmp_path):
    paths = []
    for shade in (0, 255):
        pixels = np.full((20, 60, 3), 128, dtype=np.uint8)
        pixels[:, :10] = shade
        paths.append(tmp_path / f"{shade}.png")
        Image.fromarray(pixels).save(paths[-1])
    one, other = patches_of(Embedder(*model), FileImages(paths))
    assert not torch.allclose(one, other, atol=1e-3)


def test_a_model_as_it_is_trained_and_as_it_is_loaded_embeds_the_same_to_the_last_bit(model, wide):
    trained = copy.deepcopy(model[0]).train()
    use_packed_attention(trained)
    assert torch.equal(Embedder(trained, model[1]).images(wide).vectors, Embedder(*model).images(wide).vectors)


def test_a_model_in_training_is_left_as_it_was(model, wide):
    encoder, tokenizer = model
    encoder.train()
    before = torch.get_rng_state()
    embedder = Embedder(encoder, tokenizer)
    vectors = [embedder.images(wide).vectors, embedder.texts(TEXTS), embedder.phrases([CAPTION], [TREE])]
    assert encoder.training
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(found.requires_grad for found in vectors)
    assert all(parameter.requires_grad for parameter in encoder.parameters())


# ---- phrases ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A model whose context has sixteen tokens."""
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    vision = {"image_size": 16, "patch_size": 8, "head_width": 16, **tower}
    text = {"context_length": 16, "vocab_size": 49408, "heads": 2, **tower}
    encoder = build(config={"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}).eval()
    return encoder, CaptionTokenizer(context_length=16)


@pytest.mark.parametrize("batch", [250, 2])
def test_a_phrase_is_the_sum_of_its_normalised_leaves_in_the_order_of_the_tree(small, batch, monkeypatch):
    monkeypatch.setattr(embedding, "BATCH", batch)
    encoder, tokenizer = small
    trees = [parse_bracketed("(NP two cats)", "two cats"), TREE]
    queries = Embedder(*small).phrases(["two cats", CAPTION], trees)
    with torch.inference_mode():
        _, words = encoder.encode_words(tokenizer.pad([tokenizer.encode(CAPTION).ids]))

    def leaf(start, end):  # every word is one token here, and the start token comes first
        return normalize(words[0, start + 1 : end + 1].sum(0), dim=0)

    dog, sitting, on, chair = leaf(0, 2), leaf(2, 3), leaf(3, 4), leaf(4, 7)
    expected = {
        "a dog": dog,
        "sitting on a red chair": sitting + on + chair,
        "on a red chair": on + chair,
        "a red chair": chair,
        CAPTION: dog + sitting + on + chair,
    }
    assert len(queries) == 1 + len(TREE.nodes)
    for node, query in zip(TREE.nodes, queries[1:], strict=True):
        torch.testing.assert_close(query, expected[CAPTION[node.start : node.end]], atol=1e-5, rtol=1e-5)


def test_a_caption_cut_at_the_context_length_still_has_a_query_for_each_node(small):
    long = " ".join(["a dog"] * 12)
    tree = parse_bracketed(f"(NP {' '.join(['(NP a dog)'] * 12)})", long)
    queries = Embedder(*small).phrases([long], [tree])
    assert queries.shape == (13, 16)
    assert queries.isfinite().all()


# ---- work that is shared ---------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch):
    """The images that were decoded."""
    seen = []
    original = FileImages.decode
    monkeypatch.setattr(FileImages, "decode", lambda self, content: seen.append(1) or original(self, content))
    return seen


def test_embedders_that_share_pixels_decode_an_image_once_for_each_preparation(model, wide, decoded):
    pixels = PixelStore()
    alone = Embedder(*model).images(wide).vectors
    decoded.clear()
    for _ in range(2):
        assert torch.equal(Embedder(*model, pixels=pixels).images(wide).vectors, alone)
    assert len(decoded) == 7
    squashed = Embedder(*squashing(model), pixels=pixels)
    assert not torch.equal(squashed.images(wide).vectors, alone)
    assert len(decoded) == 14
    patches_of(Embedder(*model, pixels=pixels), wide)  # squashed as well
    assert len(decoded) == 14


def test_shared_pixels_are_bounded(model, wide, decoded):
    pixels = PixelStore(limit=2 * 3 * 32 * 32 * 4)
    for _ in range(2):
        Embedder(*model, pixels=pixels).images(wide)
    assert len(decoded) == 7 + 5


def test_the_images_of_the_last_task_are_not_embedded_again(model, wide, decoded):
    embedder = Embedder(*model)
    assert embedder.images(wide) is embedder.images(wide)
    assert len(decoded) == 7
    embedder.images(FileImages(wide.paths[:2]))
    embedder.images(wide)
    assert len(decoded) == 7 + 2 + 7


def test_damage_shows_without_embedding_anything(model, wide, tmp_path, monkeypatch):
    monkeypatch.setattr(type(model[0]), "encode_image", None)
    Embedder(*model).check_images(wide)
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"2 of 3 images cannot be read .*bad\.png.*gone\.png"):
        Embedder(*model).check_images(FileImages([wide.paths[0], tmp_path / "bad.png", tmp_path / "gone.png"]))


def test_the_shares_of_the_ranks_are_the_whole(model, tmp_path, monkeypatch):
    # In one process: what each of three ranks fills in, added up as gloo does it.
    monkeypatch.setattr(embedding, "CHUNK", 8)
    monkeypatch.setattr(embedding, "BATCH", 8)
    monkeypatch.setattr(Ranks, "sum", lambda self, values: values)
    monkeypatch.setattr(Ranks, "raise_on_all", lambda self, action: action())
    monkeypatch.setattr(embedding, "TOLERANCE", 1.0)
    task = read_path(caption_table(tmp_path))
    trees = [parse_bracketed(f"(NP {caption})", caption) for caption in task.captions]
    whole = Embedder(*model)
    shares = [Embedder(*model, ranks=Ranks(rank, 3)) for rank in range(3)]
    found = [share.images(task.images) for share in shares]
    assert torch.equal(sum(part.vectors for part in found), whole.images(task.images).vectors)
    assert torch.equal(sum(part.readable.long() for part in found), torch.ones(len(task.images.names)).long())
    for parts, expected in (
        ([share.texts(task.captions) for share in shares], whole.texts(task.captions)),
        ([share.phrases(task.captions, trees) for share in shares], whole.phrases(task.captions, trees)),
    ):
        assert torch.equal(sum(parts), expected)
        assert all((own != 0).any() for own in parts)
