"""Half-precision factors side by side multiply as float32 ones do."""

import pytest
import torch
from kernel_examples import DEVICE, instance

from powerclip.alignment import matmul as module
from powerclip.alignment.matmul import halves, split_pair

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("size", [1e-3, 1.0, 60.0])
def test_the_product_of_the_halves_is_that_of_the_whole(size):
    one = instance([20, 20], 9, 5, width=128)
    left, right = size * one.nodes, one.regions.flatten(0, 1)
    expected = left.double() @ right.double().T
    a, b = split_pair(left, right)
    assert a.dtype == b.dtype == torch.float16
    error = (a.double() @ b.double().T - expected).abs().max()
    # 1e-7: what rounding lost of small numbers is itself too small for float16 to hold in full.
    assert error <= 2e-6 * size + 1e-7
    if size >= 1:
        assert ((a[:, :128].double() @ b[:, :128].double().T) - expected).abs().max() > 10 * error


def test_bf16_factors_are_split_without_loss():
    left, right = (torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    a, b = split_pair(left, right)
    assert torch.equal(a.double() @ b.double().T, left.double() @ right.double().T)


@pytest.mark.parametrize("shape", [(7, 20), (3, 5, 33), (5, 512), (1, 3000)])
def test_the_kernel_gives_the_bits_of_the_plain_split(monkeypatch, shape):
    generator = torch.Generator().manual_seed(0)
    # From below float16's smallest number to near its largest one.
    sizes = 10 ** (13 * torch.rand(2, *shape, generator=generator) - 8.5)
    left, right = (sizes * (2 * torch.rand(2, *shape, generator=generator) - 1)).to(DEVICE)
    left, right = left.expand(2, *shape), right.transpose(0, -1)  # not contiguous
    assert module._has_kernel(left)
    ours = [*split_pair(left, right), *halves(left), *halves(right)]
    monkeypatch.setattr(module, "_has_kernel", lambda values: False)
    for one, other in zip(ours, [*split_pair(left, right), *halves(left), *halves(right)], strict=True):
        assert one.dtype == torch.float16
        assert one.shape == other.shape
        assert torch.equal(one, other)


def test_nothing_splits_into_nothing():
    assert [part.shape for part in halves(torch.empty(0, 8, device=DEVICE))] == [(0, 8), (0, 8)]
