"""The attention that training runs gives open_clip's numbers, with its weights, in both directions."""

import copy

import pytest
import torch
from tiny_towers import VARIANTS, captions, tiny_config
from torch import nn

from powerclip.encoders import Selection, build
from powerclip.encoders.self_attention import SelfAttention, attend_in_groups, use_packed_attention
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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
