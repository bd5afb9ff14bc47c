"""The rules that choose a phrase's boxes, on similarities made by hand: two alike boxes, one that is not."""

from __future__ import annotations

import pytest
import torch
from set_rules import by_cosine, mean_f1, within

GOLD = torch.tensor([True, True, False])


def test_cosine_cannot_count_two_boxes_that_look_alike_and_a_margin_can():
    q, alike = torch.tensor([0.9, 0.88, 0.1]), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert by_cosine(q, alike).tolist() == [True, False, False]
    assert within(0.1)(q, alike).tolist() == GOLD.tolist()
    assert within(0.0)(q, alike).tolist() == [True, False, False]


def test_cosine_takes_both_boxes_where_each_adds_something():
    q = torch.tensor([0.7, 0.7, -0.2])
    assert by_cosine(q, torch.eye(3)).tolist() == GOLD.tolist()


def test_f1_is_told_apart_by_the_number_of_gold_boxes():
    q, one = torch.tensor([0.9, 0.8, 0.1]), torch.tensor([True, False, False])
    found = mean_f1([(q, torch.eye(3), GOLD), (q, torch.eye(3), one)], within(0.0))
    assert found == pytest.approx([1.0, 2 / 3])
