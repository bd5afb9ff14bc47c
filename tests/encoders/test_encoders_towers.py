"""Towers of timm and of Hugging Face, and other poolings: open_clip's embeddings, and patches and words beside them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_run import tiny
from tiny_towers import tiny_config
from typer.testing import CliRunner

from powerclip.cli import app
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, RandomPatches, build, load, save, tokenizer_for
from powerclip.encoders.attention import check_class_attention
from powerclip.encoders.blend import blend
from powerclip.encoders.catalogue import catalogue
from powerclip.encoders.models import spelled_out
from powerclip.encoders.self_attention import use_packed_attention
from powerclip.encoders.text import text_blocks
from powerclip.encoders.vision import image_blocks
from powerclip.errors import UserError
from powerclip.train.loop import run_evaluation, train
from powerclip.train.sections import ModelSection
from powerclip.train.state import start

transformers = pytest.importorskip("transformers")

# timm's own tiny models: class token, mean with registers, attention pooling, relative positions.
TIMM = {
    "token": ("test_vit", "token", "linear"),
    "token-head": ("test_vit", "token", ""),
    "mean": ("test_vit2", "avg", "mlp"),
    "map": ("test_vit3", "map", "linear"),
    "map-head": ("test_vit3", "map", ""),
    "relative": ("test_vit_relpos", "", "linear"),
    "rotary": ("eva02_tiny_patch14_224", "token", ""),
}


def timm_tower(kind: str, **vision: Any) -> DualEncoder:
    name, pool, proj = TIMM[kind]
    size = 224 if kind == "rotary" else 160
    config = tiny_config()
    config["vision_cfg"] = {"timm_model_name": name, "timm_pool": pool, "timm_proj": proj, "image_size": size, **vision}
    torch.manual_seed(0)
    return build(config=config).eval()


@pytest.mark.parametrize("kind", TIMM)
def test_a_timm_tower_has_open_clips_embedding_and_a_row_for_each_patch(kind):
    model = timm_tower(kind)
    images = torch.randn(2, 3, *model.image_size)
    with torch.no_grad():
        image, patches = model.encode_patches(images)
        bare = model.image_features(images, dense=False)
        assert torch.equal(image, model.clip.encode_image(images, normalize=True))
    rows, columns = model.grid
    assert patches.shape == (2, rows * columns, 24)
    assert bare.patches.shape == (2, 0, 24)
    assert torch.equal(bare.image, image)
    assert len(image_blocks(model.clip.visual)) > 1
    features = model.train().image_features(images)
    features.patches.square().sum().backward()
    reached = [name for name, p in model.clip.visual.named_parameters() if p.grad is not None]
    assert len(reached) > 10


@pytest.mark.parametrize("kind", ["token", "token-head", "mean", "map", "map-head"])
def test_a_patch_is_embedded_as_the_head_pools_it_alone(kind):
    """The tower's own pooling, on tokens of which one patch is the only one."""
    model = timm_tower(kind)
    visual, trunk = model.clip.visual, model.clip.visual.trunk
    images = torch.randn(2, 3, *model.image_size)
    with torch.no_grad():
        tokens = trunk.forward_features(images)
        patch = tokens[:, trunk.num_prefix_tokens + 7 :][:, :1]
        pooled = trunk.attn_pool(patch) if kind.startswith("map") else patch[:, 0]
        expected = visual.head(trunk.head(trunk.fc_norm(pooled)))
        _, patches = model.encode_patches(images)
    torch.testing.assert_close(patches[:, 7], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pool", ["tok", "avg"])
@pytest.mark.parametrize("width", [32, 24])
def test_open_clips_attention_pooling_gives_its_embedding_and_each_patch_alone(pool, width):
    config = tiny_config()
    config["vision_cfg"] |= {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 3}
    config["vision_cfg"] |= {"width": width, "head_width": 8, "pool_type": pool}
    torch.manual_seed(0)
    model = build(config=config).eval()
    visual = model.clip.visual
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        image, patches = model.encode_patches(images)
        assert torch.equal(image, model.clip.encode_image(images, normalize=True))
        assert torch.equal(model.image_features(images, dense=False).image, image)
        tokens = visual.transformer(visual._embeds(images))
        alone = visual.ln_post(visual.attn_pool(tokens[:, 6:7]))[:, 0] @ visual.proj
    torch.testing.assert_close(patches[:, 5], alone, atol=1e-5, rtol=1e-5)


def test_what_needs_open_clips_own_vit_says_so():
    model = timm_tower("token")
    images = torch.randn(1, 3, 160, 160)
    with pytest.raises(UserError, match="methods that choose patches need open_clip's own ViT"):
        model.image_features(images, RandomPatches(0.5))
    with pytest.raises(UserError, match="attention scores need open_clip's own ViT"):
        check_class_attention(model.clip.visual)
    with pytest.raises(UserError, match="images are 32×32 pixels, the model reads 160×160"):
        model.encode_image(torch.zeros(1, 3, 32, 32))
    use_packed_attention(model)  # only open_clip's own layers are exchanged
    assert model.encode_image(images).shape == (1, 24)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"timm_model_name": "test_convnext"}, "timm's test_convnext, which has no patch tokens"),
        ({"timm_model_name": "no_such_vit"}, "no_such_vit, which the installed timm does not have"),
        ({"patch_dropout": 0.5}, "does not say which patches it kept"),
        ({"image_size": 96}, "image_size is 96, and timm's test_vit reads 160"),
    ],
)
def test_a_timm_tower_without_patches_is_refused_with_the_reason(vision, message):
    with pytest.raises(UserError, match=message):
        timm_tower("token", **vision)


@pytest.mark.parametrize("kind", ["token", "mean", "map"])
def test_a_timm_tower_reads_images_of_other_sizes_as_timm_itself_would_after_being_resized(kind):
    model = timm_tower(kind)
    own, other = torch.randn(1, 3, *model.image_size), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        _, _, dense = model.encode_maps(own)
        assert torch.equal(dense.flatten(2).transpose(1, 2), model.encode_patches(own)[1])
        image, _, dense = model.encode_maps(other)
        assert torch.equal(model.encode_patches(own)[0], model.encode_maps(own)[0])  # as before
        trunk = model.clip.visual.trunk
        trunk.set_input_size((64, 96))
        model.clip.visual.image_size = (64, 96)
        expected, patches = model.encode_patches(other)
    assert torch.allclose(image, expected, atol=1e-5)
    assert torch.allclose(dense.flatten(2).transpose(1, 2), patches, atol=1e-4)


def test_a_tower_with_rotary_positions_says_that_it_reads_its_own_size_only():
    with pytest.raises(UserError, match="reads images of its own size only"):
        timm_tower("rotary").encode_maps(torch.randn(1, 3, 224, 224))


# ---- text ------------------------------------------------------------------------------------------------------------

WORDS = ["a", "dog", "on", "the", "red", "chair", "sit", "##ting", "##s", "!", ".", ",", "&", "two"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A tiny BERT with a fast tokenizer of fourteen word pieces, as a folder of Hugging Face."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bert")
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    transformers.BertConfig(vocab_size=60, max_position_embeddings=120, **size).save_pretrained(folder)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    vocabulary = {word: number for number, word in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def with_text(folder: Path, hugging_face: bool = True, **text: Any) -> dict[str, Any]:
    config = tiny_config()
    config["text_cfg"] = {"hf_tokenizer_name": str(folder), "context_length": 100, **text}
    if hugging_face:
        config["text_cfg"] |= {"hf_model_name": str(folder), "hf_model_pretrained": False}
    return config


CAPTIONS = ["A dog sitting on the red chair!", "two  dogs &amp; a chair, sitting."]


@pytest.mark.parametrize("proj", ["linear", "mlp"])
@pytest.mark.parametrize("pooler", ["mean_pooler", "cls_pooler", "cls_last_hidden_state_pooler"])
def test_a_hugging_face_text_tower_has_open_clips_embedding_and_a_row_for_each_token(bert, pooler, proj):
    torch.manual_seed(0)
    model = build(config=with_text(bert, hf_pooler_type=pooler, hf_proj_type=proj)).eval()
    tokenizer = tokenizer_for(model)
    tokens = CaptionTokenizer(tokenizer)
    ids = tokens.pad([tokens.encode(caption).ids for caption in CAPTIONS])
    full = tokenizer(CAPTIONS)
    assert full.shape == (2, 100)  # beyond CLIP's 77
    assert torch.equal(full[:, : ids.shape[1]], ids)
    with torch.no_grad():
        text, words = model.encode_words(ids)
        torch.testing.assert_close(text, model.clip.encode_text(full, normalize=True), atol=1e-6, rtol=1e-5)
        assert words.shape == (2, ids.shape[1], 24)
        if pooler != "mean_pooler":  # the first token is the pooled one
            torch.testing.assert_close(F.normalize(words[:, 0], dim=-1), text, atol=1e-6, rtol=1e-5)
    assert len(text_blocks(model.clip)) == 2
    model.train().encode_words(ids)[1].sum().backward()
    assert model.clip.text.transformer.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_a_saved_model_brings_its_local_text_encoder_along(bert, tmp_path):
    source = shutil.copytree(bert, tmp_path / "bert")
    torch.manual_seed(0)
    model = build(config=with_text(source, hf_pooler_type="mean_pooler", hf_proj_type="linear")).eval()
    tokenizer = tokenizer_for(model)
    ids = tokenizer(CAPTIONS)
    with torch.no_grad():
        expected = model.encode_text(ids)
    save(model, tmp_path / "saved", tokenizer)
    moved = (tmp_path / "saved").rename(tmp_path / "moved")
    shutil.rmtree(source)
    loaded, _, theirs = load(moved)
    assert torch.equal(theirs(CAPTIONS), ids)
    with torch.no_grad():
        assert torch.equal(loaded.encode_text(ids), expected)
    # Saved again it is the same model: both have the same towers, wherever they lie.
    again, _, _ = load(save(loaded, tmp_path / "again", theirs))
    blend(again, loaded, 0.5)
    clip = open_clip.create_model(f"local-dir:{tmp_path}/again").eval()
    with torch.no_grad():
        assert torch.equal(clip.encode_text(ids, normalize=True), expected)


def test_a_frozen_tower_drops_nothing_out_also_after_an_evaluation(bert, tmp_path):
    config = with_text(bert, context_length=20, hf_proj_type="linear")
    for freeze, still in (("text", True), ("text:2", True), ("text:1", False), ("image", False)):
        state = start(replace(tiny(tmp_path, f"train.freeze={freeze}"), model=ModelSection(config=config)))
        ids = tokenizer_for(state.encoder)(CAPTIONS)
        for _ in range(2):
            # Bert drops a tenth of its states while it is trained.
            first, second = (state.encoder.encode_text(ids) for _ in range(2))
            assert torch.equal(first, second) == still
            assert state.encoder.training
            run_evaluation(lambda encoder: {"trains": encoder.training}, state)


def test_words_of_a_fast_tokenizer_know_their_characters(bert):
    tokens = CaptionTokenizer(tokenizer_for(build(config=with_text(bert))))
    pieces = []
    for caption in CAPTIONS:
        encoded = tokens.encode(caption)
        spans = zip(encoded.spans, encoded.words, strict=True)
        pieces.append([caption[start:end] for (start, end), word in spans if word])
    assert pieces[0] == ["A", "dog", "sit", "ting", "on", "the", "red", "chair"]
    assert pieces[1] == ["two", "dog", "s", "&amp", "a", "chair", "sit", "ting"]
    assert encoded.spans[0] == (0, 0)
    assert not encoded.words[-1]


def test_a_caption_is_cut_where_the_wrapper_cuts_it(bert):
    model = build(config=with_text(bert, context_length=6))
    tokenizer = tokenizer_for(model)
    ids = CaptionTokenizer(tokenizer).encode(CAPTIONS[0]).ids
    assert len(ids) == 6
    assert tokenizer([CAPTIONS[0]]).tolist() == [ids]


def test_canonical_captions_keep_their_places(bert):
    """SigLIP's cleaning drops punctuation and case."""
    config = with_text(bert, tokenizer_kwargs={"clean": "canonicalize"})
    tokens = CaptionTokenizer(tokenizer_for(build(config=config)))
    caption = "Two dogs, sitting: A (red) chair."
    encoded = tokens.encode(caption)
    words = [caption[start:end] for (start, end), word in zip(encoded.spans, encoded.words, strict=True) if word]
    assert words == ["Two", "dog", "s", "sit", "ting", "A", "red", "chair"]


def test_a_tower_that_reads_its_padding_is_padded_with_the_tokenizers_id(bert):
    """As SigLIP: both directions, pooled at the last place, a projection with a bias."""
    text = {"vocab_size": 60, "width": 32, "heads": 2, "layers": 1, "no_causal_mask": True, "pool_type": "last"}
    config = with_text(bert, hugging_face=False, proj_bias=True, **text) | {"custom_text": True}
    torch.manual_seed(0)
    model = build(config=config).eval()
    tokenizer = tokenizer_for(model)
    tokenizer.tokenizer.pad_token_id = 3  # another than open_clip's default
    model.pad_id = CaptionTokenizer(tokenizer).pad_id
    tokens = CaptionTokenizer(tokenizer)
    ids = tokens.pad([tokens.encode(caption).ids for caption in CAPTIONS])
    assert ids.shape[1] < 100
    with torch.no_grad():
        expected = model.clip.encode_text(tokenizer(CAPTIONS), normalize=True)
        assert torch.equal(model.encode_text(ids), expected)


def test_a_saved_model_keeps_its_tokenizer_and_is_open_clips(bert, tmp_path):
    torch.manual_seed(0)
    model = build(config=with_text(bert, hf_proj_type="linear")).eval()
    save(model, tmp_path / "model", tokenizer_for(model))
    loaded, _, tokenizer = load(tmp_path / "model")
    ids = tokenizer(CAPTIONS)
    with torch.no_grad():
        assert torch.equal(loaded.encode_text(ids), model.encode_text(ids))
        theirs = open_clip.create_model(f"local-dir:{tmp_path / 'model'}").eval()
        torch.testing.assert_close(theirs.encode_text(ids, normalize=True), model.encode_text(ids))


def test_a_slow_tokenizer_is_refused(bert):
    model = build(config=with_text(bert))
    tokenizer = tokenizer_for(model)
    tokenizer.tokenizer = type("SlowTokenizer", (), {"is_fast": False})()
    with pytest.raises(UserError, match="character offsets, and SlowTokenizer has none"):
        CaptionTokenizer(tokenizer)


def test_a_text_tower_that_cannot_be_found_is_one_line(tmp_path):
    config = with_text(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"are to be in .*nowhere, which is not there") as caught:
        build(config=config)
    assert "\n" not in str(caught.value)


def test_such_towers_train_save_and_stop_like_others(bert, tmp_path):
    """An image tower of timm and a text tower of Hugging Face through the training loop, two steps on scenes."""
    config = with_text(bert, context_length=20, hf_proj_type="linear")
    config["vision_cfg"] = {
        "timm_model_name": "test_vit3",
        "timm_pool": "map",
        "timm_proj": "linear",
        "image_size": 160,
    }
    recipe = tiny(tmp_path, "train.steps=2", "train.batch_size=4", "train.checkpoint_every=1")
    recipe = replace(recipe, model=ModelSection(config=config))
    result = train(recipe, tmp_path / "run", quiet=True)
    model, preprocess, tokenizer = load(tmp_path / "run")
    assert type(tokenizer).__name__ == "HFTokenizer"
    assert preprocess(Image.new("RGB", (300, 200))).shape == (3, 160, 160)
    ids = tokenizer(CAPTIONS)
    with torch.no_grad():
        assert torch.equal(model.encode_text(ids), result.encoder.encode_text(ids))
    checkpoint, _, _ = load(tmp_path / "run" / "checkpoints" / "step-000001.pt")
    assert spelled_out(checkpoint.config) == spelled_out(model.config)


# ---- the list --------------------------------------------------------------------------------------------------------


def test_the_catalogue_lists_every_model_with_its_towers_or_the_reason():
    entries = {entry.name: entry for entry in catalogue()}
    assert len(entries) > 100
    siglip = entries["ViT-B-16-SigLIP"]
    assert (siglip.obstacle, siglip.pooling, siglip.context) == (None, "attention", 64)
    assert siglip.image == "timm vit_base_patch16_siglip_224, 224"
    assert entries["ViT-B-16"].text == "transformer"
    assert "laion2b_s34b_b88k" in entries["ViT-B-16"].tags
    assert entries["roberta-ViT-B-32"].text == "Hugging Face roberta-base"
    reasons = {"RN50": "ResNet", "convnext_base": "no patch tokens", "coca_ViT-B-32": "CoCa"}
    reasons["ViTamin-XL-384"] = "reads 384"
    assert all(part in str(entries[name].obstacle) for name, part in reasons.items())
    usable = [entry for entry in entries.values() if entry.obstacle is None]
    assert len(usable) >= 111


def test_the_catalogue_is_searched_by_a_part_of_the_name_or_by_a_pattern():
    assert {entry.name for entry in catalogue("eva02-l")} == {"EVA02-L-14", "EVA02-L-14-336"}
    assert all(entry.name.startswith("RN") for entry in catalogue("RN*"))
    with pytest.raises(UserError, match=r"no model of open_clip matches 'ViT-B-17' \(did you mean"):
        catalogue("ViT-B-17")


def test_the_table_of_the_page_is_what_the_command_prints():
    import open_clip
    import timm

    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    made_with = f"with open_clip {open_clip.__version__} and timm {timm.__version__}"
    if made_with not in page:
        pytest.skip("the page was made with other versions of open_clip or timm")
    printed = CliRunner().invoke(app, ["models", "--format", "markdown"]).output.strip()
    tables, summary = printed.rsplit("\n\n", 1)
    assert tables in page
    assert summary in page
