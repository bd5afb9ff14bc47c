"""Attention of short sequences in Triton against the plain formula in float64: values and gradients."""

import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

pytestmark = pytest.mark.kernels
# The interpreter does not multiply bf16.
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
EPSILON = torch.finfo(DTYPE).eps


@pytest.mark.parametrize(("rows", "tokens", "heads"), [(2, 37, 2), (1, 197, 1), (1, 1, 1), (1, 256, 1)])
@pytest.mark.parametrize("size", [1.0, 6.0])
def test_values_and_gradients_are_those_of_attention(rows, tokens, heads, size):
    from powerclip.encoders.short_attention import attend

    generator = torch.Generator().manual_seed(0)
    packed = (size * torch.randn(rows, tokens, 3, heads, 64, generator=generator)).to(DEVICE, DTYPE).requires_grad_()
    exact = packed.detach().double().requires_grad_()
    q, k, v = exact.permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    found, _ = attend(packed)
    of_found = torch.randn(found.shape, generator=generator).to(DEVICE, DTYPE)
    found.backward(of_found)
    expected.backward(of_found.double())
    assert packed.grad is not None
    assert exact.grad is not None
    for ours, theirs in ((found, expected), (packed.grad, exact.grad)):
        assert (ours.double() - theirs).norm() <= 2 * EPSILON * theirs.norm() + 1e-6
