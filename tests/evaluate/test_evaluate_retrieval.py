import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from powerclip.evaluate.retrieval import image_ranks, recall, text_ranks


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
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_recall_equals_the_definition_by_sorting(seed, count, per_image, coarse):
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(count).repeat(per_image)[torch.randperm(count * per_image, generator=generator)]
    images = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    captions = torch.randn(len(owner), 3, generator=generator, dtype=torch.float64)
    if coarse:  # few distinct scores, so that ties occur
        images, captions = images.round(), captions.round()
    ours = recall(images, captions, owner, cutoffs=(1, 2, 5))
    for k in (1, 2, 5):
        assert (ours.text[k], ours.image[k]) == naive_recall(images, captions, owner, k)


def test_a_small_block_changes_nothing():
    images, captions = normalize(torch.randn(23, 8), dim=1), normalize(torch.randn(46, 8), dim=1)
    owner = torch.arange(23).repeat_interleave(2)
    for ranks in (text_ranks, image_ranks):
        assert torch.equal(ranks(images, captions, owner, block=5), ranks(images, captions, owner))


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_collapsed_model_recalls_nothing(value):
    same = torch.full((20, 4), value)
    result = recall(same, same)
    assert set(result.text.values()) | set(result.image.values()) == {0.0}


def test_perfect_embeddings_recall_everything():
    assert recall(torch.eye(12), torch.eye(12)).mean == 1.0


def test_one_of_several_captions_is_enough_for_the_image_but_each_caption_must_find_it():
    images = torch.eye(2)
    captions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.9], [0.1, 0.8]])
    result = recall(images, captions, torch.tensor([0, 0, 1, 1]), cutoffs=(1,))
    assert result.text == {1: 0.5}  # image 1 finds the stray caption of image 0 first
    assert result.image == {1: 0.75}  # and that caption finds image 1


def test_captions_that_point_nowhere_and_images_without_captions_are_refused():
    with pytest.raises(ValueError, match="image 1 has no caption"):
        recall(torch.eye(2), torch.eye(2), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="points to image 5"):
        recall(torch.eye(2), torch.eye(2), torch.tensor([0, 5]))
