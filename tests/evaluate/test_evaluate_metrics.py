"""Metrics by hand and by their definitions; what cannot be told apart is a miss everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity, normalize

from powerclip.errors import UserError
from powerclip.evaluate.metrics import (
    CUTOFFS,
    accuracy_by_kind,
    best_fixed_patch,
    box_masks,
    caption_pairs,
    cells_in_boxes,
    class_embeddings,
    classification,
    distances_to_middle,
    hard_negatives,
    hits_cells,
    image_ranks,
    mask_overlaps,
    mean_average_precision,
    patch_similarity,
    phrases_of_other_images,
    prefers_caption,
    recall,
    relative_similarities,
    set_f1,
    swap_hits,
    text_ranks,
)

# ---- retrieval -------------------------------------------------------------------------------------------------------


def naive_recall(images, captions, image_of_caption, k):
    """The definition, one query at a time, by sorting; a wrong answer with an equal score comes first."""
    scores = (images @ captions.T).tolist()
    owner = image_of_caption.tolist()
    text_hits = []
    for i, row in enumerate(scores):
        order = sorted(range(len(row)), key=lambda c: (-row[c], owner[c] == i))
        text_hits.append(any(owner[c] == i for c in order[:k]))
    image_hits = []
    for c in range(len(captions)):
        order = sorted(range(len(images)), key=lambda i: (-scores[i][c], i == owner[c]))
        image_hits.append(owner[c] in order[:k])
    return sum(text_hits) / len(text_hits), sum(image_hits) / len(image_hits)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 14), st.integers(1, 4), st.booleans())
def test_recall_equals_the_definition_by_sorting(seed, count, per_image, coarse):
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(count).repeat(per_image)[torch.randperm(count * per_image, generator=generator)]
    images = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    captions = torch.randn(len(owner), 3, generator=generator, dtype=torch.float64)
    if coarse:  # few distinct scores, so that ties occur
        images, captions = images.round(), captions.round()
    ours = recall(images, captions, owner)
    sides = [(ours[f"text_retrieval_recall@{k}"], ours[f"image_retrieval_recall@{k}"]) for k in CUTOFFS]
    assert sides == [naive_recall(images, captions, owner, k) for k in CUTOFFS]
    assert ours["mean_recall"] == pytest.approx(sum(map(sum, sides)) / 6)


def test_a_small_block_changes_nothing():
    images, captions = normalize(torch.randn(23, 8), dim=1), normalize(torch.randn(46, 8), dim=1)
    owner = torch.arange(23).repeat_interleave(2)
    for ranks in (text_ranks, image_ranks):
        assert torch.equal(ranks(images, captions, owner, block=5), ranks(images, captions, owner))


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_collapsed_model_recalls_nothing(value):
    same = torch.full((20, 4), value)
    assert set(recall(same, same).values()) == {0.0}


def test_perfect_embeddings_recall_everything():
    assert set(recall(torch.eye(12), torch.eye(12)).values()) == {1.0}


def test_one_of_several_captions_is_enough_for_the_image_but_each_caption_must_find_it():
    images = torch.eye(2)
    captions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.9], [0.1, 0.8]])
    result = recall(images, captions, torch.tensor([0, 0, 1, 1]))
    assert result["text_retrieval_recall@1"] == 0.5  # image 1 finds the stray caption of image 0 first
    assert result["image_retrieval_recall@1"] == 0.75  # and that caption finds image 1


def test_captions_that_point_nowhere_and_images_without_captions_are_refused():
    with pytest.raises(ValueError, match="image 1 has no caption"):
        recall(torch.eye(2), torch.eye(2), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="points to image 5"):
        recall(torch.eye(2), torch.eye(2), torch.tensor([0, 5]))


# ---- classification --------------------------------------------------------------------------------------------------


def test_a_class_is_the_normalised_mean_of_its_normalised_prompts():
    vectors = {"a photo of a dog": [2.0, 0.0], "art of a dog": [0.0, 0.5]}
    vectors |= {"a photo of a cat": [-3.0, 0.0], "art of a cat": [-0.1, 0.0]}
    classes = class_embeddings(
        lambda captions: torch.tensor([vectors[c] for c in captions]),
        ["dog", "cat"],
        ["a photo of a {c}", "art of a {c}"],
    )
    # The long prompt must not outweigh the short one.
    torch.testing.assert_close(classes, torch.tensor([[0.5**0.5, 0.5**0.5], [-1.0, 0.0]]))


def test_a_template_without_a_place_for_the_name_is_refused():
    with pytest.raises(UserError, match=r"'a photo' has no \{c\}"):
        class_embeddings(lambda captions: torch.zeros(len(captions), 2), ["dog"], ["a photo"])


@pytest.mark.parametrize(("names", "templates"), [([], ["a {c}"]), (["dog"], [])])
def test_no_class_or_no_template_is_refused(names, templates):
    with pytest.raises(UserError, match="at least one class name and one template"):
        class_embeddings(lambda captions: torch.zeros(len(captions), 2), names, templates)


def test_accuracy_equals_a_loop_over_topk():
    torch.manual_seed(0)
    images, classes = normalize(torch.randn(200, 6), dim=1), normalize(torch.randn(9, 6), dim=1)
    labels = torch.randint(9, (200,))
    ours = classification(images @ classes.T, labels)
    for k in (1, 5):
        hits = [
            int(label) in (classes @ image).topk(k).indices.tolist()
            for image, label in zip(images, labels, strict=True)
        ]
        assert ours[f"acc{k}"] == sum(hits) / 200


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_collapsed_model_classifies_nothing(value):
    found = classification(torch.full((7, 7), value), torch.arange(7))
    assert (found["acc1"], found["acc5"]) == (0, 0)


def test_average_precision_by_hand():
    # Right at ranks 1 and 3: (1/1 + 2/3) / 2.
    scores = torch.tensor([[0.9], [0.8], [0.7], [0.1]])
    assert mean_average_precision(scores, torch.tensor([[1], [0], [1], [0]])) == pytest.approx((1 + 2 / 3) / 2)


# ---- composition -----------------------------------------------------------------------------------------------------


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


def test_the_accuracy_is_over_items_with_its_standard_error_and_the_mean_over_kinds():
    kinds = ["replace_obj"] * 6 + ["swap_obj"] * 2 + ["replace_rel"] * 8
    preferred = torch.tensor([True] * 3 + [False] * 3 + [True] * 2 + [True] * 6 + [False] * 2)
    parts = hard_negatives(preferred, kinds)
    assert {kind: own["acc"] for kind, own in parts.items() if kind} == {
        "replace_obj": 0.5,
        "replace_rel": 0.75,
        "swap_obj": 1.0,
    }
    assert parts[""]["acc"] == pytest.approx(11 / 16)
    assert parts[""]["mean_kind_acc"] == pytest.approx((0.5 + 1 + 0.75) / 3)
    assert parts[""]["acc_standard_error"] == pytest.approx(math.sqrt(11 / 16 * 5 / 16 / 16))


def test_pairs_that_cannot_be_told_apart_are_misses():
    assert caption_pairs(torch.ones(3, 2, 2)) == {"image_acc": 0, "text_acc": 0, "acc": 0}
    assert caption_pairs(torch.eye(2)[None]) == {"image_acc": 1, "text_acc": 1, "acc": 1}


# ---- the pointing game -----------------------------------------------------------------------------------------------


def test_similarity_is_the_cosine_of_each_patch_with_its_query():
    patches, queries = torch.randn(3, 5, 8), torch.randn(3, 8)
    ours = patch_similarity(patches, queries)
    for t in range(3):
        for n in range(5):
            torch.testing.assert_close(ours[t, n], cosine_similarity(patches[t, n], queries[t], dim=0))


def test_one_image_serves_many_queries():
    patches, queries = torch.randn(5, 8), torch.randn(3, 8)
    torch.testing.assert_close(
        patch_similarity(patches[None], queries), patch_similarity(patches.expand(3, 5, 8), queries)
    )


def heatmap(row, column, rows=4, columns=4):
    values = torch.zeros(1, rows, columns)
    values[0, row, column] = 1.0
    return values


def hits(heatmaps, boxes):
    return hits_cells(heatmaps, cells_in_boxes(boxes, heatmaps.shape[1:]))


def test_a_hit_is_the_strongest_patch_with_its_centre_in_the_box():
    box = torch.tensor([[0.5, 0.0, 1.0, 0.25]])  # right half, top row
    assert hits(heatmap(0, 2), box).tolist() == [True]
    assert hits(heatmap(0, 3), box).tolist() == [True]
    assert hits(heatmap(2, 0), box).tolist() == [False]  # x and y are not mixed up
    assert hits(heatmap(0, 1), box).tolist() == [False]
    assert hits(heatmap(1, 2), box).tolist() == [False]


def test_a_patch_that_only_touches_the_box_is_a_miss():
    assert hits(heatmap(0, 0), torch.tensor([[0.13, 0.0, 0.5, 0.5]])).tolist() == [False]


def test_a_heatmap_that_cannot_decide_points_nowhere():
    box = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    assert hits(torch.ones(1, 4, 4), box).tolist() == [False]
    assert hits(torch.full((1, 4, 4), float("nan")), box).tolist() == [False]
    twins = heatmap(0, 0) + heatmap(1, 1)
    assert hits(twins, box).tolist() == [True]


def test_the_share_of_cells_inside_is_what_random_pointing_scores():
    torch.manual_seed(0)
    corner = torch.rand(300, 2) * 0.6
    boxes = torch.cat([corner, corner + 0.1 + 0.3 * torch.rand(300, 2)], dim=1)
    every = [hits(heatmap(r, c, 5, 7).expand(300, -1, -1), boxes) for r in range(5) for c in range(7)]
    assert abs(torch.stack(every).double().mean().item() - cells_in_boxes(boxes, (5, 7)).double().mean().item()) < 1e-9


def test_cells_follow_a_grid_that_is_not_square():
    inside = cells_in_boxes(torch.tensor([[0.0, 0.0, 0.5, 1.0]]), (2, 4))
    assert inside[0].tolist() == [[True, True, False, False]] * 2


def test_the_best_fixed_patch_is_the_one_in_most_boxes():
    boxes = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 1.0, 1.0], [0.3, 0.3, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]])
    assert best_fixed_patch(cells_in_boxes(boxes, (4, 4))) == 0.75  # row 1, column 1


@pytest.mark.parametrize("owners", [[0, 0, 1, 1], [3, 0, 3, 0, 2], [0, 0, 0, 1, 2, 4], [0, 1]])
def test_each_phrase_is_asked_once_on_another_image(owners):
    images = torch.tensor(owners)
    other = phrases_of_other_images(images)
    assert sorted(other.tolist()) == list(range(len(owners)))
    assert (images[other] != images).all()


@pytest.mark.parametrize("owners", [[0], [0, 0], [0, 0, 1]])
def test_phrases_of_mostly_one_image_have_no_others(owners):
    assert phrases_of_other_images(torch.tensor(owners)) is None


# ---- swap accuracy ---------------------------------------------------------------------------------------------------


def test_a_box_between_the_centres_has_the_patch_that_it_overlaps_most():
    boxes = torch.tensor([[0.2, 0.0, 0.34, 0.1], [0.0, 0.0, 0.5, 0.25]])
    found = box_masks(boxes, (4, 4))
    assert found[0].nonzero().tolist() == [[0, 1]]  # 0.25 to 0.34 of it, and not 0.20 to 0.25
    assert torch.equal(found[1], cells_in_boxes(boxes, (4, 4))[1])


def test_overlap_is_intersection_over_union():
    masks = cells_in_boxes(torch.tensor([[0, 0, 0.5, 1], [0.25, 0, 1, 1], [0.5, 0, 1, 1]]), (4, 4))
    expected = torch.tensor([[1, 0.25, 0], [0.25, 1, 2 / 3], [0, 2 / 3, 1]]).double()
    torch.testing.assert_close(mask_overlaps(masks), expected, atol=1e-6, rtol=0)


def test_what_lies_in_the_middle_is_nearer_to_it():
    boxes = torch.tensor([[0.25, 0.25, 0.75, 0.75], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.25, 0.25]])
    middle, whole, corner = distances_to_middle(cells_in_boxes(boxes, (4, 4))).tolist()
    assert middle == pytest.approx(0.125 * math.sqrt(2))
    assert middle < whole < corner == pytest.approx(0.375 * math.sqrt(2))


def test_swap_compares_means_in_own_and_in_swapped_boxes():
    masks = cells_in_boxes(torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 0.5]]), (2, 2))
    pair = torch.tensor([[0, 1]])
    right = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
    assert swap_hits(right, masks, pair).tolist() == [1]
    assert swap_hits(right.flip(0), masks, pair).tolist() == [0]
    # Means and not sums: own 1 + 3 and swapped 2 + 1.5, but 2 + 3 and 2 + 3 as sums.
    means = torch.tensor([[[1.0, 2.0], [1.0, 0.0]], [[1.5, 3.0], [1.5, 0.0]]])
    assert swap_hits(means, masks, pair).tolist() == [1]
    assert swap_hits(torch.full((2, 2, 2), float("nan")), masks, pair).tolist() == [0]


def test_a_map_that_ignores_its_phrase_ties_in_every_swap():
    torch.manual_seed(0)
    corner = torch.rand(40, 2) * 0.6
    masks = box_masks(torch.cat([corner, corner + 0.05 + 0.3 * torch.rand(40, 2)], dim=1), (7, 5))
    maps = torch.randn(1, 7, 5).expand(40, -1, -1)
    assert swap_hits(maps, masks, torch.combinations(torch.arange(40))).unique().tolist() == [0.5]


# ---- set accuracy ----------------------------------------------------------------------------------------------------


def test_the_best_set_by_sum_mean_and_cosine():
    q, gram = torch.tensor([[0.8, 0.7, 0.1]]), torch.eye(3)
    two, one, all_three = (torch.tensor([row], dtype=torch.bool) for row in ([1, 1, 0], [1, 0, 0], [1, 1, 1]))
    assert set_f1(q, gram, two, "cosine").item() == 1  # 0.8, 1.5 / √2 = 1.06, 1.6 / √3 = 0.92
    assert set_f1(q, gram, one, "mean").item() == 1
    assert set_f1(q, gram, all_three, "sum").item() == 1
    assert set_f1(q, gram, one, "cosine").item() == pytest.approx(2 / 3)
    # The second region is so much like the first that it adds little of its own, and lowers the cosine: 1.5 / √3.9.
    alike = torch.tensor([[1.0, 0.95, 0.0], [0.95, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert set_f1(q, alike, one, "cosine").item() == 1


def test_without_a_positive_region_the_best_set_by_sum_is_the_least_negative():
    q, gold = torch.tensor([[-0.3, -0.1]]), torch.tensor([[False, True]])
    assert set_f1(q, torch.eye(2), gold, "sum").item() == 1


def test_relative_sets_leave_out_a_region_that_every_phrase_prefers():
    q = torch.tensor([[0.9, 0.5, 0.1, 0.5], [0.9, 0.1, 0.4, 0.1]])
    gold = torch.tensor([[False, True, False, True], [False, False, True, False]])
    assert set_f1(q, torch.eye(4), gold, "relative").tolist()[0] == 1
    # The second phrase prefers the first region no more than the first does, but more than its other regions: it stays.
    assert set_f1(q, torch.eye(4), gold, "relative").tolist()[1] == pytest.approx(2 / 3)
    assert set_f1(q, torch.eye(4), gold, "mean").tolist() == [0, 0]


def test_similarities_that_ignore_their_phrase_have_no_relative_set():
    q = torch.tensor([[0.9, 0.5, 0.1]]).expand(3, -1)
    assert relative_similarities(q).abs().max() < 1e-6
    assert set_f1(q, torch.eye(3), torch.eye(3).bool(), "relative").tolist() == [0, 0, 0]
    # The only phrase of an image has no other to be compared with: its regions above their mean.
    assert relative_similarities(q[:1])[0].tolist() == pytest.approx([0.4, 0.0, -0.4])


@pytest.mark.parametrize("score", ["cosine", "mean", "sum", "relative"])
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_model_that_cannot_decide_has_chosen_the_worst_set(score, value):
    gold = torch.tensor([[True, False, False]])
    assert set_f1(torch.full((1, 3), value), torch.ones(3, 3), gold, score).item() == 0
