"""The attention that training runs gives open_clip's numbers, with its weights, in both directions."""

import copy
import logging
import types

import pytest
import torch
import torch.nn.functional as F
from tiny_towers import VARIANTS, captions, tiny_config
from torch import nn

from powerclip.encoders import Selection, build, self_attention
from powerclip.encoders.self_attention import Packed, SelfAttention, attend_in_groups, use_packed_attention
from powerclip.encoders.vision import forward_image


def pair(variant="clip"):
    torch.manual_seed(0)
    plain = build(config=tiny_config(variant)).train()
    packed = copy.deepcopy(plain)
    use_packed_attention(packed)
    return plain, packed


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_features_and_gradients_are_open_clips(variant, images):
    plain, packed = pair(variant)
    for model in (plain, packed):
        out = model(images, captions(9, 4, 12))
        (out.image.sum() + out.patches.square().sum() + out.text.sum() + out.words[:, :4].sum()).backward()
    one, other = plain(images, captions(9, 4, 12)), packed(images, captions(9, 4, 12))
    torch.testing.assert_close(one.image, other.image)
    torch.testing.assert_close(one.patches, other.patches)
    torch.testing.assert_close(one.text, other.text)
    gradients = zip(plain.named_parameters(), packed.named_parameters(), strict=True)
    for (name, mine), (other_name, theirs) in gradients:
        assert name == other_name
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_layers_are_exchanged_and_weights_are_not():
    plain, packed = pair()
    layers = [module for module in packed.modules() if isinstance(module, nn.MultiheadAttention)]
    assert layers
    assert all(type(layer) is SelfAttention for layer in layers)
    assert list(plain.state_dict()) == list(packed.state_dict())


def test_each_image_hides_its_own_patches(images):
    plain, packed = pair()
    kept = torch.tensor([[0, 3, 8], [1, 2, 5], [4, 6, 7]])
    shown = torch.tensor([[True, True, True], [True, False, True], [False, False, True]])
    pooled = [
        forward_image(model.clip.visual, images, lambda context: Selection(kept, shown))[0] for model in (plain, packed)
    ]
    torch.testing.assert_close(*pooled)


def test_tokens_that_are_not_there_change_nothing():
    torch.manual_seed(0)
    holder = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True)])
    use_packed_attention(holder)
    x, lengths = torch.randn(3, 6, 16), torch.tensor([6, 1, 4])
    attended = holder[0](x, x, x, need_weights=False, attn_mask=lengths.float())[0]
    for row, length in enumerate(lengths.tolist()):
        alone = x[row : row + 1, :length]
        expected = holder[0](alone, alone, alone, need_weights=False)[0]
        torch.testing.assert_close(attended[row, :length], expected[0])


@pytest.mark.gpu
def test_on_a_gpu_sequences_lie_end_to_end():
    torch.manual_seed(0)
    packed = torch.randn(4, 9, 3, 2, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    lengths = torch.tensor([9, 1, 4, 8], device="cuda")
    expected = packed.detach().float().requires_grad_()
    attended, other = attend_in_groups(packed, lengths), attend_in_groups(expected, lengths)
    torch.testing.assert_close(attended.float(), other, atol=0.02, rtol=0.02)
    weights = torch.randn_like(other)
    (attended.float() * weights).sum().backward()
    (other * weights).sum().backward()
    torch.testing.assert_close(packed.grad.float(), expected.grad, atol=0.05, rtol=0.05)


def test_weights_and_other_keys_take_torchs_own_way():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    holder = nn.ModuleList([copy.deepcopy(layer)])
    use_packed_attention(holder)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    torch.testing.assert_close(holder[0](x, x, x), layer(x, x, x))
    torch.testing.assert_close(holder[0](x, y, y, need_weights=False)[0], layer(x, y, y, need_weights=False)[0])


@pytest.mark.parametrize("settings", [{"batch_first": False}, {"dropout": 0.1}, {"kdim": 8, "vdim": 8}])
def test_layers_of_another_kind_are_left_alone(settings):
    holder = nn.ModuleList([nn.MultiheadAttention(16, 2, **({"batch_first": True} | settings))])
    use_packed_attention(holder)
    assert type(holder[0]) is nn.MultiheadAttention


def test_it_compiles_into_one_graph():
    torch.manual_seed(0)
    holder = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True)])
    use_packed_attention(holder)
    x = torch.randn(2, 5, 16)
    mask = torch.full((5, 5), -torch.inf).triu(1)

    def run(x, mask):
        return holder[0](x, x, x, need_weights=False, attn_mask=mask)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), run(x, mask))


class Attention(nn.Module):
    """Attention with the interface of open_clip 4's own layer: weights as torch names them, one tensor given back."""

    __module__ = "open_clip.transformer"

    def __init__(self, torchs: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.calls = torchs.num_heads, 0
        self.in_proj_weight, self.in_proj_bias, self.out_proj = (
            torchs.in_proj_weight,
            torchs.in_proj_bias,
            torchs.out_proj,
        )
        self.logit_scale = self.head_scale = None
        self.ln_q = self.ln_k = self.ln_inner = nn.Identity()
        self.attn_drop = self.out_drop = nn.Dropout(0.0)

    def forward(self, x, k_x=None, v_x=None, attn_mask=None):
        self.calls += 1
        heads = [part.unflatten(-1, (self.num_heads, -1)) for part in self.project(x, k_x, v_x)]
        q, k, v = (part.transpose(1, 2) for part in heads)
        mask = attn_mask.unflatten(0, (len(x), -1)) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        return self.out_proj(
            F.scaled_dot_product_attention(self.ln_q(q), self.ln_k(k), v, mask).transpose(1, 2).flatten(2)
        )

    def project(self, x, k_x, v_x):
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        inputs = (x, x if k_x is None else k_x, x if v_x is None else v_x)
        return [F.linear(*one) for one in zip(inputs, weights, biases, strict=True)]


def as_open_clip_4(model):
    """The same towers with blocks that call their attention as open_clip 4's do."""

    def attention(block, q_x, k_x=None, v_x=None, attn_mask=None):
        k_x, v_x = (q_x if other is None else other for other in (k_x, v_x))
        return block.attn(q_x, k_x=k_x, v_x=v_x, attn_mask=attn_mask)

    for transformer in (model.clip.visual.transformer, model.clip.transformer):
        for block in transformer.resblocks:
            block.attn = Attention(block.attn)
            block.attention = types.MethodType(attention, block)
    return model


@pytest.mark.parametrize("hides", [False, True])
def test_open_clip_4s_own_attention_runs_the_fast_path_too(hides, images, caplog):
    plain, _ = pair()
    newer = as_open_clip_4(copy.deepcopy(plain))
    own = newer.clip.visual.transformer.resblocks[0].attn
    use_packed_attention(newer)
    layers = [module for name, module in newer.named_modules() if name.endswith(".attn")]
    assert len(layers) == 4
    assert all(isinstance(layer, Packed) for layer in layers)
    kept = torch.tensor([[0, 3, 8], [1, 2, 5], [4, 6, 7]])
    shown = torch.tensor([[True, True, True], [True, False, True], [False, False, True]])
    selector = (lambda context: Selection(kept, shown)) if hides else None
    results = [model(images, captions(9, 4, 12), selector=selector) for model in (plain, newer)]
    torch.testing.assert_close(results[0].image, results[1].image)
    torch.testing.assert_close(results[0].text, results[1].text)
    assert own.calls == 0
    assert not caplog.records
    x, other = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    assert own(x, k_x=other, v_x=other).shape == (2, 3, 32)  # not to itself: open_clip's own way
    assert own.calls == 1


def test_layers_that_stay_slow_are_named_once_with_the_reason(caplog):
    self_attention._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            use_packed_attention(build(config=tiny_config("custom-blocks")))
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("2 attention layers do not run the fast path (they have qk_norm)")
    newer = as_open_clip_4(build(config=tiny_config()))
    for block in newer.clip.transformer.resblocks:
        block.attn = nn.Identity()
    use_packed_attention(newer)
    assert "they are torch.nn.modules.linear.Identity, which this version does not know" in caplog.records[-1].message
