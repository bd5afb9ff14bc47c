"""Boxes are read from COCO's files; what is wrong with them is counted and named, and never guessed."""

from __future__ import annotations

import tarfile

import pytest
import torch
from tiny_detection import boxed, picture, tiny_tower, write_coco

from powerclip.detect.classes import TEMPLATES, Classes, embed_classes, ov_coco, with_article
from powerclip.detect.coco import read_coco
from powerclip.detect.scene_boxes import scene_boxes
from powerclip.encoders import tokenizer_for
from powerclip.errors import UserError
from powerclip.evaluate.paper_tables import published

GOOD = [boxed(1, 3, [4, 3, 20, 15], 1), boxed(1, 9, [0, 0, 8, 6], 2), boxed(2, 5, [10, 10, 30, 20], 3, iscrowd=1)]


def test_boxes_become_shares_of_their_image_with_the_split_of_their_class(tmp_path):
    data = read_coco(write_coco(tmp_path, GOOD))
    assert data.classes == Classes(("dog", "cat", "unicorn"), (False, False, True))
    assert data.images[0].boxes.flatten().tolist() == pytest.approx([0.1, 0.1, 0.6, 0.6, 0, 0, 0.2, 0.2], abs=1e-6)
    assert data.images[0].labels.tolist() == [0, 2]
    assert data.images[1].crowd.tolist() == [True]
    assert data.faults == ()
    assert data.counts().tolist() == [1, 0, 1]  # a crowd is not counted
    assert data.read(2, 100).shape == (3, 30, 40)
    assert data.read(2, 20).shape == (3, 15, 20)


def test_training_sees_boxes_of_base_classes_alone(tmp_path):
    base = read_coco(write_coco(tmp_path, GOOD)).base()
    assert base.classes.names == ("dog", "cat")
    assert [image.labels.tolist() for image in base.images] == [[0]]  # one image has a crowd only, one no box
    with pytest.raises(UserError, match="no box of a base class"):
        read_coco(write_coco(tmp_path, GOOD[1:])).base()


BAD = {
    "boxes of no or of negative size": [0, 0, -5, 4],
    "boxes outside of their image": [50, 3, 4, 4],
    "boxes that are not finite": [1, 1, float("nan"), 4],
    "boxes that are not four numbers": [1, 2, 3],
}


@pytest.mark.parametrize(("fault", "bbox"), BAD.items())
def test_a_bad_box_is_left_out_and_named(fault, bbox, tmp_path):
    data = read_coco(write_coco(tmp_path, [*GOOD, boxed(1, 3, bbox, 17)]))
    assert data.boxes == 3
    (line,) = data.faults
    assert f"1 {fault} left out (annotation 17)" in line


def test_bad_boxes_of_several_kinds_are_counted_apart(tmp_path):
    more = [boxed(1, 77, [1, 1, 5, 5], 20), boxed(99, 3, [1, 1, 5, 5], 21), boxed(1, 3, [30, 1, 15, 5], 22)]
    data = read_coco(write_coco(tmp_path, [*GOOD, boxed(1, 3, [0, 0, 5, 0], 19), *more]))
    assert [line.partition(": ")[2] for line in data.faults] == [
        "1 boxes of no or of negative size left out (annotation 19)",
        "1 boxes of an unknown class left out (annotation 20)",
        "1 boxes of images that it does not list left out (annotation 21)",
        "1 boxes cut at the edges of their image (annotation 22)",
    ]
    assert data.images[0].boxes[-1, 2] == 1


def test_a_file_of_corners_instead_of_sizes_is_refused(tmp_path):
    corners = [boxed(1, 3, [38 - k, 20, 10, 5], k) | {"bbox": [30, 20, -2, -5]} for k in range(4)]
    with pytest.raises(UserError, match=r"only 1 of 5 boxes can be used; bbox is \[left, top, width, height\]"):
        read_coco(write_coco(tmp_path, [GOOD[0], *corners]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"categories": [{"id": 1, "name": "dragon"}]}, "none is one of OV-COCO's 65"),
        ({"categories": [{"id": 1, "name": "dog", "split": "rare"}]}, "split of category 'dog' is base or novel"),
        ({"categories": [{"id": 1}]}, "a category needs an id and a name"),
        ({"images": []}, "it lists no image"),
        ({"annotations": None}, "not in COCO's format"),
    ],
)
def test_a_file_of_another_kind_is_one_clear_line(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_coco(write_coco(tmp_path, GOOD, **changes))


def test_images_come_from_a_folder_a_tar_or_a_compressed_tar_alike(tmp_path):
    path = write_coco(tmp_path, GOOD)
    folder, tar = tmp_path / "pictures", tmp_path / "pictures.tar"
    with tarfile.open(tmp_path / "boxes.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    with tarfile.open(tar, "w") as plain:
        plain.add(folder, "pictures")
    read = [read_coco(path, [place]).read(0, 40) for place in (tmp_path / "boxes.tar.gz", folder, tar)]
    assert torch.equal(read[0], read[1])
    assert torch.equal(read[0], read[2])
    (folder / "0007.png").unlink()
    (folder / "0002.png").write_bytes(picture((1, 2, 3))[:50])
    data = read_coco(path, [folder])
    assert "1 images that are not there left out (0007.png)" in data.faults[0]
    assert data.read(1, 40) is None  # damaged
    with pytest.raises(UserError, match="no file or folder"):
        read_coco(path, [tmp_path / "missing"])
    with pytest.raises(UserError, match="there is no file"):
        read_coco(tmp_path / "other.json")


def test_a_file_without_images_beside_it_says_what_to_give(tmp_path):
    path = write_coco(tmp_path, GOOD)
    (tmp_path / "boxes.tar.gz").unlink()
    with pytest.raises(UserError, match="say where they are with --images"):
        read_coco(path)


def test_without_a_split_in_the_file_ov_cocos_decides_and_other_classes_are_left_out(tmp_path):
    categories = [{"id": 3, "name": "person"}, {"id": 5, "name": "dog"}, {"id": 9, "name": "unicorn"}]
    data = read_coco(write_coco(tmp_path, GOOD, categories=categories))
    assert data.classes == Classes(("person", "dog"), (False, True))
    assert data.boxes == 2
    assert data.faults == ()  # COCO's other fifteen classes are no mistake


def test_the_split_and_the_papers_rows_fit_each_other():
    split = ov_coco()
    assert (len(split["base"]), len(split["novel"])) == (48, 17)
    assert not set(split["base"]) & set(split["novel"])
    for method, (base, novel, everything) in published()["ov_coco"]["rows"].items():  # the mean over the 65 classes
        assert (48 * base + 17 * novel) / 65 == pytest.approx(everything, abs=0.06), method


def test_scenes_hold_combinations_of_colour_and_shape_out():
    train, val = scene_boxes(60, part="train"), scene_boxes(60, part="val")
    novel = torch.tensor(train.classes.novel)
    assert len(novel) == 80
    assert novel.sum() == 12
    assert train.counts()[novel].sum() == 0
    assert val.counts()[novel].sum() == 30
    assert val.counts()[~novel].sum() > 30
    assert torch.equal(val.read(3, 32), val.read(3, 32))


def test_a_class_is_mentioned_as_people_do_and_is_a_direction_of_its_prompts():
    names = {
        "umbrella": "an umbrella",
        "a red dog": "a red dog",
        "skis": "skis",
        "bus": "a bus",
        "unicorn": "a unicorn",
    }
    assert {name: with_article(name) for name in names} == names
    assert with_article("two dogs") == "two dogs"
    tower = tiny_tower()
    tokenizer = tokenizer_for(tower)
    texts = embed_classes(tower, tokenizer, ["umbrella", "two dogs"])
    with torch.no_grad():
        prompts = tower.encode_text(tokenizer([template.replace("{c}", "an umbrella") for template in TEMPLATES]))
    mean = torch.nn.functional.normalize(prompts.mean(0), dim=0)
    assert torch.allclose(texts[0], mean, atol=1e-5)
    with pytest.raises(UserError, match="named twice"):
        Classes(("dog", "dog"), (False, True))
