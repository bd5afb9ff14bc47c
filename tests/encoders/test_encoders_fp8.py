"""Float8 products: what is rounded and how, which layers have them, and where they are refused."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from tiny_towers import captions, tiny_config
from torch import nn

from powerclip.encoders import build, fp8
from powerclip.encoders.self_attention import Packed, use_packed_attention
from powerclip.errors import UserError

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Float64 numbers rounded row by row as e4m3 is defined: 3 bits after the first, exponents from −6 to 8."""
    scale = (values.abs().amax(1, keepdim=True).float() / 448).double()
    scaled = (values.float() / scale.float()).double()
    step = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / step).round() * step * scale


def example(device: str = "cpu", tokens: int = 40) -> tuple[torch.Tensor, ...]:
    """x [n, I], W [O, I], b [O] and the gradient of y [n, O]; rows of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, of_y = (
        torch.randn(*shape, generator=generator) for shape in ((tokens, 64), (48, 64), (48,), (tokens, 48))
    )
    x = (x * 10 ** torch.linspace(-3, 2, tokens).unsqueeze(1)).bfloat16()
    return tuple(value.to(device) for value in (x, weight, bias.bfloat16().float(), of_y.bfloat16()))


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (found.double().cpu() - expected.cpu()).norm() / expected.norm().cpu()
    assert error <= tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients_are_those_of_rounded_factors(device):
    x, weight, bias, of_y = example(device)
    ours = [value.clone().requires_grad_() for value in (x, weight, bias)]
    y = fp8.linear(ours[0].unflatten(0, (5, -1)), *ours[1:])
    assert y.dtype == torch.bfloat16
    y.backward(of_y.unflatten(0, (5, -1)))
    x, weight, bias, of_y = (value.double() for value in (x, weight, bias, of_y))
    # bf16 results have errors of 2^-9; the tensor cores add float8 products with 14 bits.
    assert_close(y.flatten(0, 1), rounded(x) @ rounded(weight).T + bias, 3e-3)
    assert_close(ours[0].grad, rounded(of_y) @ rounded(weight.T).T, 3e-3)
    assert_close(ours[1].grad, of_y.T @ x, 5e-3)
    assert_close(ours[2].grad, of_y.sum(0), 5e-3)


def test_each_row_has_the_scale_of_its_largest_number():
    values = torch.tensor([[1e-6, -3e-6, 0.0], [0.0, 0.0, 0.0], [5e4, 1.0, -7e4]])
    found, scale = fp8.quantised(values)
    assert found.float().abs().amax(1).tolist() == [448, 0, 448]
    torch.testing.assert_close(scale[:, 0], torch.tensor([3e-6, 1e-12, 7e4]) / 448)
    assert (found.float() * scale)[1].eq(0).all()


def test_what_is_not_finite_stays_so():
    x, weight, bias, _ = example()
    x[3, 5] = torch.inf
    y = fp8.linear(x, weight, bias)
    assert not y[3].isfinite().any()
    assert y[4].isfinite().all()


@pytest.fixture
def anywhere(monkeypatch):
    """Products in float8 without a GPU that has them, as they would be there."""
    monkeypatch.setattr(fp8, "why_not", lambda device: None)


def towers():
    config = tiny_config("clip")
    for part in ("vision_cfg", "text_cfg"):
        config[part]["width"] = 32
    config["vision_cfg"]["head_width"] = 16
    torch.manual_seed(0)
    plain = build(config=config).train()
    use_packed_attention(plain)
    quantised = copy.deepcopy(plain)
    return plain, quantised


def blocks(encoder):
    return [*encoder.clip.visual.transformer.resblocks, *encoder.clip.transformer.resblocks]


def test_the_linear_layers_of_the_blocks_are_exchanged_and_weights_are_not(anywhere):
    plain, quantised = towers()
    fp8.use_fp8(blocks(quantised), CPU)
    for block in blocks(quantised):
        assert block.attn.fp8
        assert {type(layer) for layer in (block.attn.out_proj, block.mlp.c_fc, block.mlp.c_proj)} == {fp8.Fp8Linear}
    outside = [module for name, module in quantised.named_modules() if "resblocks" not in name]
    assert not any(isinstance(module, fp8.Fp8Linear) for module in outside)
    for (name, one), (other, two) in zip(plain.named_parameters(), quantised.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one, two)


def test_towers_train_nearly_the_same_and_evaluate_the_same(anywhere, images):
    plain, quantised = towers()
    fp8.use_fp8(blocks(quantised), CPU)

    def features(model):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images, captions(9, 4, 12))
        return out.image.float(), out.text.float()

    found, expected = features(quantised), features(plain)
    for one, other in zip(found, expected, strict=True):
        assert not torch.equal(one, other)
        assert F.cosine_similarity(one, other).min() > 0.99
    for model, (image, text) in ((plain, expected), (quantised, found)):
        (image @ text.T).diagonal().sum().backward()
        assert all(p.grad is not None for block in blocks(model) for p in block.parameters())
    one, other = (torch.cat([p.grad.flatten() for p in model.clip.visual.parameters()]) for model in (plain, quantised))
    assert F.cosine_similarity(one, other, dim=0) > 0.97
    plain.eval(), quantised.eval()
    for one, other in zip(features(quantised), features(plain), strict=True):
        assert torch.equal(one, other)


def test_layers_that_do_not_fit_or_do_not_train_stay(anywhere, caplog):
    narrow, frozen = nn.Linear(20, 16), nn.Linear(16, 16).requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        fp8.use_fp8([narrow, frozen], CPU)
    assert (type(narrow), type(frozen)) == (nn.Linear, nn.Linear)
    assert caplog.messages == ["1 weights of the blocks stay in bf16: float8 takes linear layers of multiples of 16"]
    attention = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True)])
    use_packed_attention(attention)
    fp8.use_fp8(attention, CPU)
    assert isinstance(attention[0], Packed)
    assert attention[0].fp8
    assert not Packed.fp8


def test_it_compiles_into_one_graph():
    x, weight, bias, _ = example()
    torch.testing.assert_close(
        torch.compile(fp8.linear, backend="aot_eager", fullgraph=True)(x, weight, bias), fp8.linear(x, weight, bias)
    )


def test_a_device_without_float8_is_refused_in_a_line(monkeypatch):
    with pytest.raises(UserError, match=r"^train.precision: fp8 needs an NVIDIA GPU, and this runs on cpu; take bf16$"):
        fp8.use_fp8([], CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(
        UserError, match=r"fp8 needs a GPU of compute capability 8.9, and NVIDIA A100 has 8.0; take bf16"
    ):
        fp8.use_fp8([], torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8.why_not(torch.device("cuda")) is None
