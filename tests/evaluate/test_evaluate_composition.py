import pytest
import torch

from powerclip.evaluate.composition import KINDS, accuracy_by_kind, group_means, prefers_caption


def test_only_a_strictly_higher_score_counts():
    images = torch.tensor([[1.0, 0.0]]).repeat(4, 1)
    captions = torch.tensor([[0.5, 0.0], [0.5, 0.0], [0.5, 0.0], [float("nan"), 0.0]])
    negatives = torch.tensor([[0.4, 9.0], [0.5, 0.0], [0.6, 0.0], [0.0, 0.0]])
    assert prefers_caption(images, captions, negatives).tolist() == [True, False, False, False]


def test_accuracy_is_counted_within_each_kind():
    kinds = ["add_att", "replace_obj", "add_att", "replace_obj", "add_att"]
    by_kind = accuracy_by_kind(torch.tensor([True, False, True, True, False]), kinds)
    assert by_kind == {"replace_obj": 1 / 2, "add_att": 2 / 3}
    assert list(by_kind) == ["replace_obj", "add_att"]  # the order of the tables, not of the data


def test_groups_are_the_papers_object_attribute_and_relation_means():
    by_kind = dict(zip(KINDS, [0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.2], strict=True))
    assert group_means(by_kind) == pytest.approx({"obj": 0.6, "att": 0.5, "rel": 0.7})


def test_a_group_without_measurements_is_absent():
    assert group_means({"replace_rel": 0.5}) == {"rel": 0.5}
