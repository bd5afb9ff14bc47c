"""Half-precision factors side by side multiply as float32 ones do."""

import pytest
import torch
from kernel_examples import instance

from powerclip.alignment.kernels.split import split_pair


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


def test_bf16_stays_as_it_is():
    left, right = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
    assert split_pair(left, right) == (left, right)
