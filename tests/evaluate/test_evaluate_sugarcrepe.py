"""SugarCrepe: its files are read as published, and the numbers are those of its definition."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import build
from powerclip.errors import UserError
from powerclip.evaluate.sugarcrepe import CompositionResults, evaluate_sugarcrepe, read_sugarcrepe

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture
def folder(mini_corpus, tmp_path):
    return shutil.copytree(mini_corpus / "sugarcrepe", tmp_path / "sugarcrepe")


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return build(config=CONFIG)


def test_items_are_read_in_order_and_those_without_a_image_counted(folder):
    benchmark = read_sugarcrepe(folder)
    assert [(item.kind, item.image.name) for item in benchmark.items] == [
        ("replace_att", "red.png"),
        ("replace_att", "blue.png"),
        ("swap_obj", "red.png"),
    ]
    assert benchmark.items[0].negative == "a blue square"
    assert benchmark.missing == 1
    assert benchmark.summary() == "3 comparisons (1 left out: their images are not there)"


def test_images_may_lie_elsewhere(folder, tmp_path):
    (folder / "images").rename(tmp_path / "val2017")
    assert read_sugarcrepe(folder, tmp_path / "val2017").missing == 1
    with pytest.raises(UserError, match="none of the images"):
        read_sugarcrepe(folder)


def test_a_caption_is_preferred_when_it_scores_higher(folder, encoder, monkeypatch):
    # Texts about blue and walls embed along one axis, others along another; the red image along the second.
    def text(_, tokens: torch.Tensor) -> torch.Tensor:
        blue, wall = (CaptionTokenizer().encode(word).ids[1] for word in ("blue", "wall"))
        first = ((tokens == blue) | (tokens[:, 2:3] == wall)).any(1).float()
        return torch.stack([first, 1 - first], 1)

    def image(_, images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0], [0.0, 1.0]])[: len(images)]  # both images look red

    monkeypatch.setattr(type(encoder), "encode_text", text)
    monkeypatch.setattr(type(encoder), "encode_image", image)
    found = evaluate_sugarcrepe(encoder, CaptionTokenizer(), read_sugarcrepe(folder))
    assert found.accuracy == {"replace_att": 0.5, "swap_obj": 1.0}
    assert found.counts == {"replace_att": 2, "swap_obj": 1}
    assert found.missing == 1


def test_the_mean_is_over_items_with_its_standard_error_and_groups_are_over_kinds():
    found = CompositionResults(
        {"replace_obj": 0.5, "swap_obj": 1.0, "replace_rel": 0.75},
        {"replace_obj": 6, "swap_obj": 2, "replace_rel": 8},
        0,
    )
    assert found.mean == pytest.approx((3 + 2 + 6) / 16)
    assert found.error == pytest.approx(math.sqrt(found.mean * (1 - found.mean) / 16))
    assert found.groups == {"obj": 0.75, "rel": 0.75}


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"0": {"filename": "red.png"}}', "3"])
def test_a_damaged_file_is_named(folder, content):
    (folder / "add_obj.json").write_text(content)
    with pytest.raises(UserError, match=r"add_obj\.json"):
        read_sugarcrepe(folder)


def test_a_damaged_image_is_named(folder, encoder):
    (folder / "images" / "blue.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"blue\.png cannot be read"):
        evaluate_sugarcrepe(encoder, CaptionTokenizer(), read_sugarcrepe(folder))


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="none of SugarCrepe's files"):
        read_sugarcrepe(tmp_path)


def test_the_published_items_whose_images_are_there_are_all_compared(real_data, encoder):
    benchmark = read_sugarcrepe(real_data / "sugarcrepe")
    files = sorted((real_data / "sugarcrepe").glob("*.json"))
    listed = {path.stem: len(json.loads(path.read_text())) for path in files}
    assert len(benchmark.items) + benchmark.missing == sum(listed.values())
    found = evaluate_sugarcrepe(encoder, CaptionTokenizer(), benchmark)
    assert benchmark.missing or found.counts == listed
    assert 0.3 < found.mean < 0.7  # untrained: near chance
    assert found.groups.keys() == {"obj", "att", "rel"}
