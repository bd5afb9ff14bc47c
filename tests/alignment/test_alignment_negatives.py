"""Hard negatives: those found block by block are those of the whole matrix."""

import pytest
import torch
from alignment_examples import hardest

from powerclip.alignment import negatives as module
from powerclip.alignment.negatives import annealed_count, find_hardest, find_semi_hard, hardest_pairs
from powerclip.runtime.distributed import SINGLE


@pytest.fixture
def rows_at_a_time(monkeypatch):
    """Sets how many images a block has, for a batch of so many pairs."""
    return lambda rows, total: monkeypatch.setattr(module, "BLOCK_ELEMENTS", rows * total)


@pytest.mark.parametrize("count", [2, 7, 33])
@pytest.mark.parametrize("k", [1, 3, 99])
@pytest.mark.parametrize("rows", [99, 4, 1])
def test_blocks_of_images_give_the_hardest_of_the_matrix(count, k, rows, rows_at_a_time):
    scores = torch.randn(count, count, generator=torch.Generator().manual_seed(count))
    rows_at_a_time(rows, count)
    sizes = []

    def block(images: slice) -> torch.Tensor:
        sizes.append(images.stop - images.start)
        return scores[images]

    captions, images = hardest_pairs(block, range(count), count, k)
    assert torch.equal(captions.columns, hardest(scores, k))
    assert torch.equal(images.columns, hardest(scores.T, k))
    assert torch.equal(captions.scores, scores.gather(1, captions.columns))
    assert torch.equal(images.scores, scores.T.gather(1, images.columns))
    assert max(sizes) <= rows
    assert sum(sizes) == count


@pytest.mark.parametrize("k", [1, 4])
def test_equal_scores_give_distinct_negatives_and_never_the_positive(k, rows_at_a_time):
    rows_at_a_time(4, 9)
    for top in hardest_pairs(lambda images: torch.zeros(images.stop - images.start, 9), range(9), 9, k):
        for label, row in enumerate(top.columns.tolist()):
            assert len(set(row)) == k
            assert label not in row


def test_a_positive_above_all_is_left_out(rows_at_a_time):
    rows_at_a_time(5, 12)
    scores = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) + 100 * torch.eye(12)
    captions, images = find_hardest(lambda images: scores[images], 12, 12, 2, SINGLE)
    assert torch.equal(captions, hardest(scores, 2))
    assert torch.equal(images, hardest(scores.T, 2))


@pytest.mark.parametrize("rows", [99, 2])
def test_the_images_of_one_rank_keep_their_numbers_in_the_batch(rows, rows_at_a_time):
    rows_at_a_time(rows, 12)
    scores = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    of_rank = scores[4:7]
    captions, images = hardest_pairs(lambda images: of_rank[images], range(4, 7), 12, 5)
    assert torch.equal(captions.columns, hardest(scores, 5)[4:7])
    others = scores.masked_fill(torch.eye(12, dtype=torch.bool), -torch.inf)[4:7].T
    assert torch.equal(images.columns, others.topk(3).indices + 4)  # the rank has no more images
    assert torch.equal(images.scores, others.topk(3).values)


def test_a_semi_hard_negative_is_the_hardest_below_the_positive_or_else_the_hardest():
    scores = torch.tensor([[0.5, 0.9, 0.4, 0.1], [0.2, 0.1, 0.3, 0.6], [0.7, 0.8, 0.9, 0.0], [0.6, 0.5, 0.95, 0.55]])
    captions, images, highest = find_semi_hard(scores, torch.arange(4), SINGLE)
    assert captions.flatten().tolist() == [2, 3, 1, 1]
    assert images.flatten().tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(highest, torch.tensor([0.9, 0.6, 0.8, 0.95]))


def test_annealed_negatives_fall_from_all_to_one_by_the_same_factor():
    counts = [annealed_count(1025, step / 300) for step in range(300)]
    assert counts[0] == 1024
    assert counts[150] == 32
    assert counts[-1] == 1
    assert counts == sorted(counts, reverse=True)
    assert annealed_count(2, 0.5) == 1
