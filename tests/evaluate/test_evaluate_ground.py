"""`powerclip.ground`: the typed result, against literal computation from the model's features."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import powerclip
from powerclip.data.scenes import render, test_scenes
from powerclip.encoders import build, preprocess_for, tokenizer_for
from powerclip.errors import UserError
from powerclip.evaluate.ground import GroundingModel, GroundSettings, ground, view_of
from powerclip.evaluate.ground_regions import Regions, region_masks

CAPTION = "a dog sitting on a red chair"
BRACKETS = "(NP (NP a dog) (VP sitting (PP on (NP a red chair))))"


def tiny(**preprocess):
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "head_width": 16, **tower},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "heads": 2, **tower},
    }
    encoder = build(config=config).eval()
    encoder.clip.visual.preprocess_cfg.update(preprocess)
    return GroundingModel.of((encoder, preprocess_for(encoder), tokenizer_for(encoder)), "tiny")


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(render(test_scenes(1, 0), 48)[0].permute(1, 2, 0).numpy())


def test_phrases_are_the_nodes_of_the_tree_with_heatmaps_of_their_words(model, image):
    found = ground(model, image, CAPTION, tree=BRACKETS)
    assert [(phrase.text, phrase.parent) for phrase in found.phrases] == [
        (CAPTION, None),
        ("a dog", 0),
        ("sitting on a red chair", 0),
        ("on a red chair", 2),
        ("a red chair", 3),
    ]
    # "a dog" is one leaf: the sum of its two tokens.
    tokens = tokenizer_for(model.encoder)([CAPTION])
    with torch.inference_mode():
        text, words = model.encoder.encode_words(tokens)
        whole, patches = model.encoder.encode_patches(model.preprocess(image)[None])
    query = F.normalize(words[0, 1:3].sum(0), dim=-1)
    torch.testing.assert_close(
        found.phrases[1].heatmap.flatten(), F.normalize(patches[0], dim=-1) @ query, atol=1e-5, rtol=0
    )
    assert found.clip == pytest.approx(float(whole[0] @ text[0]), abs=1e-5)


def test_the_best_set_by_cosine_is_the_best_of_all_sets(model, image):
    found = ground(model, image, CAPTION, GroundSettings(Regions(count=6, seed=3)), tree=BRACKETS)
    with torch.inference_mode():
        _, patches = model.encoder.encode_patches(model.preprocess(image)[None])
    regions = torch.stack([F.normalize(patches[0, list(cells)].sum(0), dim=-1) for cells in found.regions]).double()
    for phrase in found.phrases:
        # The cosine with a set, from the cosines of its members: |φ_A| = |Σ φ_m|.
        by_set = {
            members: float(phrase.similarities.double()[list(members)].sum() / regions[list(members)].sum(0).norm())
            for size in range(1, 7)
            for members in itertools.combinations(range(6), size)
        }
        assert phrase.best == max(by_set, key=by_set.__getitem__)
        assert phrase.score == pytest.approx(max(by_set.values()), abs=1e-5)
        assert float(phrase.shares.sum()) == pytest.approx(phrase.score)


def test_relative_heatmaps_are_what_tells_the_lowest_phrases_apart(model, image):
    found = ground(model, image, CAPTION, tree=BRACKETS)
    relative = found.relative()
    dog, chair = (relative.phrases[number].heatmap for number in (1, 4))
    torch.testing.assert_close(dog, -chair)
    torch.testing.assert_close(dog - chair, found.phrases[1].heatmap - found.phrases[4].heatmap)
    assert torch.equal(relative.heatmap, found.heatmap)
    assert relative.phrases[1].best == found.phrases[1].best
    alone = ground(model, image, "a dog", tree="(NP a dog)")
    assert torch.equal(alone.relative().phrases[0].heatmap, alone.phrases[0].heatmap)


def test_a_model_by_path_by_what_load_gave_and_as_one_are_the_same(model, image, tmp_path):
    folder = powerclip.save(model.encoder, tmp_path / "tiny")
    path = tmp_path / "image.png"
    image.save(path)
    expected = ground(model, image, CAPTION).to_json()
    for other in (folder, powerclip.load(folder)):
        assert powerclip.ground(other, path, CAPTION).to_json() | {"model": "tiny"} == expected


def test_json_holds_the_whole_result(model, image):
    found = ground(model, image, CAPTION, GroundSettings(Regions(count=4), "sum", "nla"))
    told = json.loads(json.dumps(found.to_json()))
    assert told["scores"]["score"] == pytest.approx(found.t2r + found.r2t, abs=1e-4)
    assert len(told["regions"]) == 4
    assert told["settings"]["regions"]["kind"] == "random"
    for phrase, shown in zip(found.phrases, told["phrases"], strict=True):
        torch.testing.assert_close(torch.tensor(shown["heatmap"]), phrase.heatmap, atol=1e-5, rtol=0)
        assert sum(shown["shares"]) == pytest.approx(shown["score"], abs=1e-3)


def test_what_the_context_length_cuts_off_is_said_and_its_phrases_are_left_out(model, image):
    caption = "a small dog near a red ball and a blue box and a green cross and a final star"
    found = ground(model, image, caption)
    assert found.unread.endswith("a final star")
    assert "a final star" not in [phrase.text for phrase in found.phrases]
    assert ground(model, image, CAPTION).unread == ""


@pytest.mark.parametrize(
    ("mode", "view"),
    [("shortest", (0.25, 0.0, 0.75, 1.0)), ("squash", (0.0, 0.0, 1.0, 1.0)), ("longest", (0.0, -0.5, 1.0, 1.5))],
)
def test_the_view_is_what_the_preprocessing_keeps(mode, view):
    model = tiny(resize_mode=mode)
    assert view_of(model, (80, 40)) == pytest.approx(view)
    # Whatever lies in the view is what the model sees: paint the middle half white and look at its input.
    wide = Image.new("RGB", (80, 40))
    wide.paste((255, 255, 255), (20, 0, 60, 40))
    white = (model.preprocess(wide)[0] > 1).float()
    share = 40 * 40 / ((view[2] - view[0]) * 80 * (view[3] - view[1]) * 40)
    assert float(white.mean()) == pytest.approx(share, abs=0.07)


def test_a_drawn_box_covers_the_patches_whose_middles_it_holds():
    regions = Regions("boxes", boxes=((0.5, 0.0, 1.0, 0.5), (0.26, 0.26, 0.3, 0.3)))
    masks = region_masks(regions, (0.0, 0.0, 1.0, 1.0), (4, 4)).unflatten(1, (4, 4))
    assert masks[0].nonzero().tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert masks[1].nonzero().tolist() == [[1, 1]]  # smaller than a patch: the one under its middle
    cropped = region_masks(Regions("boxes", boxes=((0.0, 0.0, 0.5, 1.0),)), (0.25, 0.0, 0.75, 1.0), (2, 2))
    assert cropped.unflatten(1, (2, 2))[0].tolist() == [[True, False], [True, False]]


def test_superpixels_are_distinct_regions_and_the_seed_chooses_among_them(model, image):
    first, again, other = (
        ground(model, image, CAPTION, GroundSettings(Regions("superpixels", count=3, seed=seed))) for seed in (0, 0, 1)
    )
    assert first.regions == again.regions
    assert len(set(first.regions)) == len(first.regions) <= 3
    assert first.regions != other.regions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regions("randon"), "did you mean"),
        (lambda: Regions(count=13), "1 to 12"),
        (lambda: Regions("boxes"), "draw 1 to 12"),
        (lambda: Regions("boxes", boxes=((0.5, 0.5, 0.4, 0.9),)), "left before right"),
        (lambda: Regions("boxes", boxes=((float("nan"), 0.5, 0.6, 0.9),)), "left before right"),
        (lambda: GroundSettings(similarity="cosine", aggregation="nla"), "no approximation"),
        (lambda: GroundSettings(tau=0.0), "tau"),
        (
            lambda: region_masks(Regions("boxes", boxes=((0.0, 0.0, 0.2, 1.0),)), (0.25, 0.0, 0.75, 1.0), (2, 2)),
            "outside",
        ),
    ],
)
def test_settings_that_cannot_be_are_one_clear_line(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
