"""The chart finds the best tree and the sum over all trees, as enumeration does."""

import itertools

import pytest
import torch

from powerclip.annotate.parsers.chart import best_trees, cell, cell_edges, log_partition, marginals

CPU = torch.device("cpu")
Spans = frozenset[tuple[int, int]]


def all_trees(length: int) -> list[Spans]:
    """Every tree over `length` words, as its phrases: the root is one, a single word may be one or not."""
    return [tree | {(0, length)} for tree in _inside(0, length)]


def _inside(first: int, end: int) -> list[Spans]:
    if end - first == 1:
        return [frozenset()]
    trees = []
    for cuts in itertools.product([False, True], repeat=end - first - 1):
        edges = [first, *(first + 1 + at for at, cut in enumerate(cuts) if cut), end]
        if len(edges) == 2:
            continue
        choices = []
        for a, b in itertools.pairwise(edges):
            inner = [tree | {(a, b)} for tree in _inside(a, b)]
            choices.append([frozenset(), frozenset({(a, b)})] if b - a == 1 else inner)
        trees += [frozenset().union(*choice) for choice in itertools.product(*choices)]
    return trees


def random_labels(length: int, sentences: int = 3) -> torch.Tensor:
    torch.manual_seed(length)
    return 2 * torch.randn(sentences, length * (length + 1) // 2, dtype=torch.float64)


def scores(trees: list[Spans], labels: torch.Tensor, length: int) -> torch.Tensor:
    return torch.stack([sum(labels[cell(*span, length)] for span in tree) for tree in trees])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_the_best_tree_is_the_best_of_all_trees(length):
    trees, labels = all_trees(length), random_labels(length)
    firsts, ends = (edge.tolist() for edge in cell_edges(length, CPU))
    for phrases, row in zip(best_trees(labels, torch.full((3,), length)), labels, strict=True):
        best = frozenset((firsts[at], ends[at]) for at in phrases.nonzero()[:, 0].tolist())
        assert best == trees[int(scores(trees, row, length).argmax())]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_the_partition_counts_every_tree_once(length):
    trees, labels = all_trees(length), random_labels(length)
    assert len(trees) == len(set(trees))
    expected = torch.stack([torch.logsumexp(scores(trees, row, length), 0) for row in labels])
    assert torch.allclose(log_partition(labels, torch.full((3,), length)), expected)


def test_marginals_are_the_shares_of_the_trees_that_hold_a_span():
    length = 4
    trees, labels = all_trees(length), random_labels(length, 1)
    shares = torch.softmax(scores(trees, labels[0], length), 0)
    actual = marginals(labels, torch.tensor([length]))[0]
    for first, end in zip(*(edge.tolist() for edge in cell_edges(length, CPU)), strict=True):
        expected = sum(share for tree, share in zip(trees, shares, strict=True) if (first, end) in tree)
        assert torch.allclose(actual[cell(first, end, length)], torch.as_tensor(expected, dtype=torch.float64))


def test_a_shorter_sentence_in_a_batch_is_as_if_alone():
    long, short = 5, 3
    labels = random_labels(long, 1)
    firsts, ends = (edge.tolist() for edge in cell_edges(short, CPU))
    alone = labels[:, [cell(first, end, long) for first, end in zip(firsts, ends, strict=True)]]
    assert torch.allclose(log_partition(labels, torch.tensor([short])), log_partition(alone, torch.tensor([short])))
    cells = [cell(first, end, long) for first, end in zip(firsts, ends, strict=True)]
    for several in ([short], [1]):
        padded = best_trees(labels, torch.tensor(several))
        assert padded.sum() == padded[:, cells].sum()
    assert torch.equal(best_trees(labels, torch.tensor([short]))[:, cells], best_trees(alone, torch.tensor([short])))
    assert best_trees(labels, torch.tensor([1])).nonzero().tolist() == [[0, 0]]


def test_cells_are_numbered_by_length_and_then_by_start():
    firsts, ends = cell_edges(4, CPU)
    assert [cell(first, end, 4) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)] == list(range(10))


@pytest.mark.parametrize("lengths", [[5, 5], [1, 5], [3, 2]])
def test_the_gradient_of_the_partition_is_right_for_sentences_of_any_length(lengths):
    labels = random_labels(5, 2).requires_grad_()
    assert torch.autograd.gradcheck(log_partition, (labels, torch.tensor(lengths)))
