"""Hardest negatives from a stream of blocks are those of the whole matrix."""

import pytest
import torch

from powerclip.alignment.contrast import hardest
from powerclip.alignment.kernels.hardest import hardest_pairs


@pytest.mark.parametrize("count", [2, 7, 33])
@pytest.mark.parametrize("k", [1, 3, 99])
@pytest.mark.parametrize(("rows", "columns"), [(99, 99), (4, 99), (99, 5), (4, 3), (1, 1)])
def test_streaming_finds_the_hardest_of_the_matrix(count, k, rows, columns):
    scores = torch.randn(count, count, generator=torch.Generator().manual_seed(count))
    asked = []

    def block(images: slice, captions: slice) -> torch.Tensor:
        asked.append((images.stop - images.start) * (captions.stop - captions.start))
        return scores[images, captions]

    captions, images = hardest_pairs(block, count, k, rows, columns)
    assert torch.equal(captions, hardest(scores, k))
    assert torch.equal(images, hardest(scores.T, k))
    assert max(asked) <= rows * columns
    assert sum(asked) == count * count


@pytest.mark.parametrize("k", [1, 4])
def test_equal_scores_give_distinct_negatives_and_never_the_positive(k):
    captions, images = hardest_pairs(lambda i, c: torch.zeros(i.stop - i.start, c.stop - c.start), 9, k, 4, 3)
    for found in (captions, images):
        for own, row in enumerate(found.tolist()):
            assert len(set(row)) == k
            assert own not in row


def test_a_positive_above_all_is_left_out():
    scores = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) + 100 * torch.eye(12)
    captions, images = hardest_pairs(lambda i, c: scores[i, c], 12, 2, 5, 5)
    assert torch.equal(captions, hardest(scores, 2))
    assert torch.equal(images, hardest(scores.T, 2))
