"""AP50 is pycocotools', gold boxes are named as counted by hand, and exponents are chosen without a novel box."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_detection import boxed, tiny_tower, write_coco

from powerclip.detect import calibrate
from powerclip.detect.average_precision import average_precision, coco_results, coco_truth
from powerclip.detect.calibrate import Calibration, choose_exponents, deal
from powerclip.detect.classes import Classes
from powerclip.detect.coco import read_coco
from powerclip.detect.data import in_pixels
from powerclip.detect.detector import Detections, ScoredBoxes, detections, region_embeddings
from powerclip.detect.naming import name_gold_boxes
from powerclip.detect.scene_boxes import scene_boxes
from powerclip.errors import UserError

TRUE = [
    boxed(1, 3, [0, 0, 20, 20], 1),
    boxed(1, 5, [20, 10, 20, 20], 2),
    boxed(2, 3, [10, 10, 10, 10], 3),
    boxed(7, 9, [0, 0, 40, 30], 4),
    boxed(7, 3, [0, 0, 5, 5], 5, iscrowd=1),
]


def found(*rows: tuple[list[float], int, float]) -> Detections:
    """Boxes in pixels of an image of 40 × 30, labels and scores."""
    sides = torch.tensor([40.0, 30.0, 40.0, 30.0])
    boxes = torch.tensor([row[0] for row in rows]) / sides
    return Detections(boxes, torch.tensor([row[1] for row in rows]), torch.tensor([row[2] for row in rows]))


def test_ap50_is_what_the_precision_at_each_recall_says(tmp_path):
    data = read_coco(write_coco(tmp_path, TRUE))
    guesses = {
        0: found(
            ([0, 0, 20, 20], 0, 0.9), ([0, 0, 20, 18], 0, 0.5), ([0, 0, 6, 6], 1, 0.8), ([20, 10, 40, 30], 1, 0.3)
        ),
        1: found(([30, 20, 40, 30], 0, 0.7), ([10, 10, 20, 19], 0, 0.6)),
    }
    measured = average_precision(data, guesses)
    # dog: right, wrong, right, double: precision 1 up to half of the recall, 2/3 beyond. cat: wrong, right: 1/2.
    assert measured.of_class == pytest.approx(((51 + 50 * 2 / 3) / 101, 0.5, 0.0), abs=1e-6)
    assert measured.scores["ap50_base"] == pytest.approx((measured.of_class[0] + 0.5) / 2)
    assert measured.scores["ap50_novel"] == 0
    assert measured.scores["ap50"] == pytest.approx(sum(measured.of_class) / 3)


def test_ap50_equals_pycocotools_own_evaluation_of_the_written_files(tmp_path):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    data = scene_boxes(30, part="val")
    generator = torch.Generator().manual_seed(0)
    guesses = {}
    for number, image in enumerate(data.images):
        moved = image.boxes + 0.05 * torch.randn(image.boxes.shape, generator=generator)
        boxes = torch.cat([moved, torch.rand(4, 4, generator=generator).sort(-1).values[:, [0, 1, 2, 3]]])
        labels = torch.cat([image.labels, torch.randint(0, 80, (4,), generator=generator)])
        guesses[number] = Detections(boxes, labels, torch.rand(len(labels), generator=generator))
    truth, results = tmp_path / "truth.json", tmp_path / "results.json"
    truth.write_text(json.dumps(coco_truth(data)))
    results.write_text(json.dumps(coco_results(data, guesses)))
    with contextlib.redirect_stdout(io.StringIO()):
        gold = COCO(str(truth))
        reference = COCOeval(gold, gold.loadRes(str(results)), "bbox")
        reference.evaluate()
        reference.accumulate()
        reference.summarize()
    measured = average_precision(data, guesses)
    assert measured.scores["ap50"] == pytest.approx(reference.stats[1], abs=1e-9)
    assert 0.1 < measured.scores["ap50"] < 0.99
    assert measured.scores["ap50_base"] != measured.scores["ap50_novel"]


def test_without_detections_ap50_is_zero_and_without_boxes_it_is_nothing(tmp_path):
    data = read_coco(write_coco(tmp_path, TRUE[:3]))
    assert average_precision(data, {}).scores == {"ap50_base": 0.0, "ap50_novel": None, "ap50": 0.0}


def test_gold_boxes_get_the_class_whose_direction_is_nearest_to_what_lies_under_them():
    tower, data = tiny_tower(), scene_boxes(6, part="val")
    regions = []
    with torch.no_grad():
        for number, image in enumerate(data.images):
            pixels = data.read(number, 64).float() / 255
            mean, std = (
                torch.tensor(tower.clip.visual.preprocess_cfg[name])[:, None, None] for name in ("mean", "std")
            )
            dense = tower.encode_maps(((pixels - mean) / std)[None])[2]
            regions.append(region_embeddings(dense, [in_pixels(image.boxes, (64, 64))], 8))
    # Each class of the first box that shows it is that box's own direction, and no box looks like another class.
    texts = torch.zeros(len(data.classes), 32)
    for image, embedded in zip(data.images, regions, strict=True):
        texts[image.labels] = embedded
    right = [
        (embedded @ texts.T).argmax(-1) == image.labels for image, embedded in zip(data.images, regions, strict=True)
    ]
    novel = [torch.tensor(data.classes.novel)[image.labels] for image in data.images]
    expected, of_novel = torch.cat(right).float(), torch.cat(novel)
    accuracies = name_gold_boxes(tower, data, texts, 64).accuracies()
    assert accuracies["region"]["all"] == pytest.approx(expected.mean().item())
    assert accuracies["region"]["novel"] == pytest.approx(expected[of_novel].mean().item())
    assert accuracies["region"]["base"] == pytest.approx(expected[~of_novel].mean().item())
    assert accuracies["region"]["all"] > 0.7
    assert accuracies["chance"]["all"] == 1 / 80
    counts = data.counts()
    assert accuracies["most frequent class"]["all"] == pytest.approx((counts.max() / counts.sum()).item())
    turned = name_gold_boxes(tower, data, texts.roll(1, 0), 64).accuracies()
    assert turned["region"]["all"] < 0.3
    with pytest.raises(UserError, match="no box to name"):
        name_gold_boxes(tower, data.take([]), texts, 64).accuracies()


def test_what_lies_under_a_box_is_the_mean_of_its_patches():
    dense = torch.randn(1, 5, 6, 8)
    (embedded,) = region_embeddings(dense, [torch.tensor([[16.0, 8.0, 48.0, 24.0]])], 8)
    mean = dense[0, :, 1:3, 2:6].mean((1, 2))
    # RoIAlign samples between the centres of cells: exact for a linear map, close for noise.
    linear = torch.arange(48.0).view(1, 1, 6, 8) * torch.ones(1, 5, 1, 1) + torch.arange(5.0).view(1, 5, 1, 1)
    (exact,) = region_embeddings(linear, [torch.tensor([[16.0, 8.0, 48.0, 24.0]])], 8)
    expected = torch.nn.functional.normalize(linear[0, :, 1:3, 2:6].mean((1, 2)), dim=0)
    assert torch.allclose(exact, expected, atol=1e-5)
    assert torch.nn.functional.cosine_similarity(embedded, mean, dim=0) > 0.5


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_a_score_is_the_weighted_geometric_mean_of_both_opinions():
    one = ScoredBoxes(torch.zeros(1, 4), torch.tensor([[0.64, 0.09]]), torch.tensor([[0.25, 0.5]]))
    assert one.score(torch.tensor([0.0, 1.0])).tolist() == [pytest.approx([0.64, 0.5])]
    assert one.score(torch.tensor([0.5, 0.5])).tolist() == [pytest.approx([0.4, 0.045**0.5])]
    assert one.score(torch.tensor([0.3, 0.0]))[0, 1].item() == pytest.approx(0.09)


def test_of_overlapping_boxes_of_a_class_the_surest_stays():
    boxes = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.48], [0.6, 0.6, 0.9, 0.9]])
    learned = torch.tensor([[0.6, 0.3], [0.5, 0.4], [0.2, 0.00001]])
    kept = detections(ScoredBoxes(boxes, learned, learned), torch.zeros(2))
    assert list(zip(kept.labels.tolist(), [round(s, 3) for s in kept.scores.tolist()], strict=True)) == [
        (0, 0.6),
        (1, 0.4),
        (0, 0.2),
    ]


# ---- exponents -------------------------------------------------------------------------------------------------------


def test_exponents_are_dealt_from_base_classes_and_base_images_alone():
    data = scene_boxes(80, part="train")
    parts = deal(data.base(), seed=0)
    novel = {name for name, one in zip(data.classes.names, data.classes.novel, strict=True) if one}
    held_out = {name for name, one in zip(parts.rest.classes.names, parts.rest.classes.novel, strict=True) if one}
    assert not novel & set(parts.rest.classes.names)
    assert not held_out & set(parts.kept.classes.names)
    assert 0.2 < len(held_out) / len(parts.rest.classes) < 0.3
    assert not {image.name for image in parts.kept.images} & {image.name for image in parts.rest.images}
    assert [data.base().classes.names[label] for label in parts.kept_labels] == list(parts.kept.classes.names)
    with pytest.raises(UserError, match="too few to choose exponents: give the exponents, --exponents"):
        deal(data.base().only([0]), seed=0)


def test_boxes_of_novel_classes_change_nothing_about_the_choice():
    data = scene_boxes(80, part="train")
    names = data.classes.names
    seen = data.with_classes(Classes(names, tuple(name.startswith("orange") for name in names)))
    without = seen.only(seen.classes.numbers(novel=False))  # the same images without their novel boxes
    one, other = deal(seen.base(), seed=3), deal(without.base(), seed=3)
    assert one.labels == other.labels
    assert one.rest.classes == other.rest.classes
    for a, b in zip(one.rest.images, other.rest.images, strict=True):
        assert a.name == b.name
        assert torch.equal(a.boxes, b.boxes)
        assert torch.equal(a.labels, b.labels)


def test_each_part_gets_the_exponent_with_which_its_classes_are_found_best(monkeypatch, tmp_path):
    parts = deal(scene_boxes(150).base(), seed=0)
    data = parts.rest
    novel = torch.tensor(data.classes.novel)
    generator = torch.Generator().manual_seed(0)

    def find(detector, data, texts, on_image):
        """The learned opinion knows the classes that were seen, the tower the others; otherwise they guess."""
        for number, image in enumerate(data.images):
            right = torch.nn.functional.one_hot(image.labels, len(novel)) * 0.8 + 0.1
            guess = torch.rand(right.shape, generator=generator)
            of_seen = ~novel[image.labels, None]
            yield (
                number,
                ScoredBoxes(image.boxes, torch.where(of_seen, right, guess), torch.where(of_seen, guess, right)),
            )

    monkeypatch.setattr(calibrate, "find_boxes", find)
    chosen = choose_exponents(None, parts, torch.zeros(len(novel), 4), quiet=True)
    assert chosen.exponents.base < 0.5 < chosen.exponents.novel
    assert chosen.warning() is None
    assert "of novel classes: the choice is mostly chance" in (replace(chosen, novel=(0.001,) * 11).warning() or "")
    chosen.write(tmp_path / "exponents.json")
    assert Calibration.read(tmp_path / "exponents.json") == chosen
    assert Calibration.read(Path(tmp_path / "none.json")) is None
