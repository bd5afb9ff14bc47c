"""Hardest negatives from a stream of blocks are those of the whole matrix."""

import pytest
import torch

from powerclip.alignment.contrast import hardest
from powerclip.alignment.hardest import hardest_pairs


@pytest.mark.parametrize("count", [2, 7, 33])
@pytest.mark.parametrize("k", [1, 3, 99])
@pytest.mark.parametrize(("rows", "columns"), [(99, 99), (4, 99), (99, 5), (4, 3), (1, 1)])
def test_streaming_finds_the_hardest_of_the_matrix(count, k, rows, columns):
    scores = torch.randn(count, count, generator=torch.Generator().manual_seed(count))
    asked = []

    def block(images: slice, captions: slice) -> torch.Tensor:
        asked.append((images.stop - images.start) * (captions.stop - captions.start))
        return scores[images, captions]

    captions, images = hardest_pairs(block, range(count), count, k, rows, columns)
    assert torch.equal(captions.columns, hardest(scores, k))
    assert torch.equal(images.columns, hardest(scores.T, k))
    assert torch.equal(captions.scores, scores.gather(1, captions.columns))
    assert torch.equal(images.scores, scores.T.gather(1, images.columns))
    assert max(asked) <= rows * columns
    assert sum(asked) == count * count


@pytest.mark.parametrize("k", [1, 4])
def test_equal_scores_give_distinct_negatives_and_never_the_positive(k):
    def equal(images: slice, captions: slice) -> torch.Tensor:
        return torch.zeros(images.stop - images.start, captions.stop - captions.start)

    for found in hardest_pairs(equal, range(9), 9, k, 4, 3):
        for own, row in enumerate(found.columns.tolist()):
            assert len(set(row)) == k
            assert own not in row


def test_a_positive_above_all_is_left_out():
    scores = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) + 100 * torch.eye(12)
    captions, images = hardest_pairs(lambda i, c: scores[i, c], range(12), 12, 2, 5, 5)
    assert torch.equal(captions.columns, hardest(scores, 2))
    assert torch.equal(images.columns, hardest(scores.T, 2))


@pytest.mark.parametrize(("rows", "columns"), [(99, 99), (2, 5)])
def test_some_of_the_images_keep_their_numbers_in_the_batch(rows, columns):
    scores = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    here = scores[4:7]
    captions, images = hardest_pairs(lambda i, c: here[i, c], range(4, 7), 12, 5, rows, columns)
    assert torch.equal(captions.columns, hardest(scores, 5)[4:7])
    others = scores.masked_fill(torch.eye(12, dtype=torch.bool), -torch.inf)[4:7].T
    assert torch.equal(images.columns, others.topk(3).indices + 4)  # no more images are here
    assert torch.equal(images.scores, others.topk(3).values)
