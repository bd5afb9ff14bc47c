"""The dual encoder gives open_clip's embeddings, with the dense ones from the same pass."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from tiny_towers import VARIANTS, captions, tiny_config

from powerclip.encoders import DualEncoder, Features, build
from powerclip.encoders.vision import conv_as_linear
from powerclip.errors import UserError


def encoder(variant: str = "clip") -> DualEncoder:
    torch.manual_seed(0)
    return build(config=tiny_config(variant)).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_global_embeddings_are_open_clips_bit_for_bit(variant, images, tokens):
    model = encoder(variant)
    features = model(images, tokens)
    assert torch.equal(features.image, model.clip.encode_image(images, normalize=True))
    assert torch.equal(features.text, model.clip.encode_text(tokens, normalize=True))
    assert torch.equal(model.encode_image(images), features.image)
    assert torch.equal(model.encode_text(tokens), features.text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_features_have_one_row_for_each_patch_and_token(variant, images, tokens):
    model = encoder(variant)
    features = model(images, tokens[:, :12])
    assert model.grid == (4, 6)
    assert model.image_size == (32, 48)
    assert features.patches.shape == (3, 24, model.embed_dim)
    assert features.words.shape == (3, 12, model.embed_dim)
    assert features.kept is None


def test_patches_are_the_normed_and_projected_last_layer(images):
    model = encoder()
    inner = model.clip.visual.forward_intermediates(images, indices=1, normalize_intermediates=True, output_fmt="NLC")
    _, patches = model.encode_patches(images)
    torch.testing.assert_close(patches, inner["image_intermediates"][-1] @ model.clip.visual.proj)


def test_patches_are_normed_even_where_open_clip_norms_after_pooling(images):
    model = encoder("clipa")
    inner = model.clip.visual.forward_intermediates(images, indices=1, normalize_intermediates=True, output_fmt="NLC")
    _, patches = model.encode_patches(images)
    torch.testing.assert_close(patches, inner["image_intermediates"][-1] @ model.clip.visual.proj)


@pytest.mark.parametrize("variant", ["clip", "eos-pool", "linear-projection"])
def test_the_word_at_the_end_of_text_is_the_caption_embedding(variant, tokens):
    text, words = encoder(variant).encode_words(tokens)
    ends = words[torch.arange(3), torch.tensor([8, 3, 11])]
    torch.testing.assert_close(F.normalize(ends, dim=-1), text)


def test_one_call_equals_the_towers_called_apart(images, tokens):
    model = encoder()
    features = model(images, tokens)
    image, patches = model.encode_patches(images)
    text, words = model.encode_words(tokens)
    assert torch.equal(features.image, image)
    assert torch.equal(features.patches, patches)
    assert torch.equal(features.text, text)
    assert torch.equal(features.words, words)


def test_each_tower_runs_once(images, tokens):
    model = encoder()
    calls = []
    for tower in (model.clip.visual.transformer, model.clip.transformer):
        tower.register_forward_hook(lambda module, args, output: calls.append(module))
    model(images, tokens)
    assert calls == [model.clip.visual.transformer, model.clip.transformer]


@pytest.mark.parametrize("dense", ["patches", "words"])
def test_a_dense_feature_alone_trains_its_whole_tower_and_no_other(dense, images, tokens):
    model = encoder().train()
    getattr(model(images, tokens), dense).square().sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    visual = {name for name, _ in model.named_parameters() if name.startswith("clip.visual.")}
    text = {name for name, _ in model.named_parameters() if name not in visual} - {"clip.logit_scale"}
    assert reached == (visual if dense == "patches" else text)


def test_the_logit_scale_is_a_factor_and_a_scalar(images, tokens):
    features = encoder("sigmoid")(images, tokens)
    torch.testing.assert_close(features.logit_scale, torch.tensor(1 / 0.07))
    assert features.logit_bias is not None
    torch.testing.assert_close(features.logit_bias, torch.tensor(-10.0))
    assert encoder()(images, tokens).logit_bias is None


def test_the_logit_scale_is_clamped_to_a_hundred(images, tokens):
    model = encoder()
    model.clip.logit_scale.data.fill_(50.0)
    model.clamp_logit_scale()
    torch.testing.assert_close(model(images, tokens).logit_scale, torch.tensor(100.0))


def test_every_parameter_appears_once():
    model = encoder()
    assert len(list(model.parameters())) == len(list(model.clip.parameters()))
    assert all(name.startswith("clip.") for name in model.state_dict())


def test_images_of_another_size_are_refused_with_both_sizes(tokens):
    with pytest.raises(UserError, match="48×48 pixels, the model reads 32×48"):
        encoder()(torch.zeros(3, 3, 48, 48), tokens)


def test_captions_beyond_the_context_are_refused():
    with pytest.raises(UserError, match="17 tokens, but the model reads at most 16"):
        encoder().encode_text(captions(5, width=17))


def test_the_forward_pass_compiles_to_one_graph(images, tokens):
    model = encoder()
    with torch.no_grad():
        plain: Features = model(images, tokens)
        torch.compiler.reset()
        # aot_eager traces everything that a full compilation would, without waiting for a C++ compiler
        compiled: Features = torch.compile(model, fullgraph=True, backend="aot_eager")(images, tokens)
    torch.testing.assert_close(compiled.patches, plain.patches)
    torch.testing.assert_close(compiled.words, plain.words)
    torch.testing.assert_close(compiled.image, plain.image)


def test_reading_the_types_does_not_wait_for_open_clip():
    check = "import sys; from powerclip.encoders import DualEncoder, Features; sys.exit('open_clip' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_dense_features_the_global_ones_are_the_same(variant, images, tokens):
    model = encoder(variant)
    whole, bare = model(images, tokens), model(images, tokens, dense=False)
    torch.testing.assert_close(bare.image, whole.image)
    torch.testing.assert_close(bare.text, whole.text)
    assert bare.patches.shape == (3, 0, model.embed_dim)
    assert bare.words.shape == (3, 0, model.embed_dim)


@pytest.mark.parametrize("dense", [True, False])
def test_captions_in_groups_of_their_own_lengths_have_the_features_of_one_group(images, tokens, dense):
    model = encoder()
    tokens = tokens[tokens.argmax(1).argsort()][:, :20]
    shorter = int(tokens[:2].argmax(1).max()) + 1
    whole = model(images, tokens, dense=dense)
    grouped = model(images, (tokens[:2, :shorter], tokens[2:]), dense=dense)
    torch.testing.assert_close(grouped.text, whole.text)
    assert grouped.words.shape == whole.words.shape
    if dense:
        torch.testing.assert_close(grouped.words[:2, :shorter], whole.words[:2, :shorter])
        torch.testing.assert_close(grouped.words[2], whole.words[2])


@pytest.mark.parametrize("bias", [True, False])
def test_the_patch_embedding_is_a_matrix_product(bias):
    convolution = torch.nn.Conv2d(3, 8, (4, 6), (4, 6), bias=bias)
    images = torch.randn(2, 3, 12, 18)
    expected = convolution(images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(conv_as_linear(convolution, images), expected)


# ---- images of other sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_at_the_towers_own_size_maps_are_its_patches_bit_for_bit(variant, images):
    model = encoder(variant)
    with torch.no_grad():
        image, _, dense = model.encode_maps(images)
        expected, patches = model.encode_patches(images)
    assert torch.equal(image, expected)
    assert torch.equal(dense.flatten(2).transpose(1, 2), patches)


def test_at_another_size_maps_are_those_of_the_tower_that_open_clip_makes_for_it():
    from open_clip.model import resize_pos_embed

    config = tiny_config()
    config["vision_cfg"]["image_size"] = 32  # open_clip takes the positions in weights for a square
    model = build(config=config).eval()
    config["vision_cfg"]["image_size"] = [64, 40]
    larger = build(config=config).eval()
    state = model.clip.state_dict()
    resize_pos_embed(state, larger.clip)
    larger.clip.load_state_dict(state)
    wide = torch.randn(2, 3, 64, 40)
    with torch.no_grad():
        image, _, dense = model.encode_maps(wide)
        expected, patches = larger.encode_patches(wide)
    assert dense.shape == (2, 24, 8, 5)
    assert torch.allclose(image, expected, atol=1e-6)
    assert torch.allclose(dense.flatten(2).transpose(1, 2), patches, atol=1e-5)
    with pytest.raises(UserError, match="no whole number of patches"):
        model.encode_maps(wide[:, :, :60])
