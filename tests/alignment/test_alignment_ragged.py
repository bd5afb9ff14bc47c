"""Ragged reductions equal the same reductions on padded rows, values and gradients."""

import pytest
import torch
from alignment_examples import random_segments

from powerclip.alignment.ragged import pad, segment_logsumexp, segment_max, segment_mean, segment_sum, unpad


def padded(values, segments, reduce, fill):
    rows = torch.nn.utils.rnn.pad_sequence(values.split(segments.lengths.tolist()), True, fill)
    return reduce(rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["sum", "mean", "max", "logsumexp"])
def test_ragged_equals_padded(name, seed):
    segments = random_segments(5, seed)
    values = torch.randn(len(segments.index), 3, dtype=torch.float64, requires_grad=True)
    ragged, reduce, fill = {
        "sum": (segment_sum, lambda rows: rows.sum(1), 0.0),
        "mean": (segment_mean, lambda rows: rows.sum(1) / segments.lengths.unsqueeze(-1), 0.0),
        "max": (segment_max, lambda rows: rows.amax(1), -torch.inf),
        "logsumexp": (segment_logsumexp, lambda rows: rows.logsumexp(1), -torch.inf),
    }[name]
    weight = torch.randn(5, 3, dtype=torch.float64)
    ours, theirs = ragged(values, segments), padded(values, segments, reduce, fill)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad((weight * ours).sum(), values), torch.autograd.grad((weight * theirs).sum(), values)
    )


def test_logsumexp_takes_the_maximum_out():
    segments = random_segments(3, 0)
    values = torch.full((len(segments.index), 1), 1e4)
    assert segment_logsumexp(values, segments).isfinite().all()


def test_unpad_is_the_way_back_from_pad_and_its_gradient_is_pad():
    segments = random_segments(5, 1)
    values = torch.randn(len(segments.index), 3)
    rows = pad(values, segments, torch.nan).requires_grad_()
    assert torch.equal(unpad(rows, segments), values)
    weight = torch.randn(len(segments.index), 3)
    (gradient,) = torch.autograd.grad((weight * unpad(rows, segments)).sum(), rows)
    assert torch.equal(gradient, pad(weight, segments, 0.0))
