"""Images of all kinds to pixels: the crop that was asked for, quickly, or a reason why not."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from shard_examples import encoded, ramp

from powerclip.data import decode
from powerclip.data.crops import random_crop
from powerclip.data.decode import decode_crop
from powerclip.data.faults import BadSample, Fault


def expected(image: Image.Image, size: tuple[int, int], smallest: float, key: int) -> torch.Tensor:
    """The crop as Pillow makes it: decoded as a whole, cut, resized."""
    box = random_crop(*image.size, smallest, key)
    cut = image.convert("RGB").crop(box).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(cut)).float()


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (200, 130), (31, 17)])
@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_a_crop_is_what_pillow_would_cut_and_resize(shape, form):
    data = encoded(ramp(*shape, blue=90), form, **({"lossless": True} if form == "webp" else {}))
    whole = Image.open(io.BytesIO(data))
    for key in range(5):
        crop = decode_crop(data, (40, 24), 0.4, key)
        assert crop.pixels.shape == (40, 24, 3)
        assert crop.pixels.dtype == torch.uint8
        assert (crop.pixels.float() - expected(whole, (40, 24), 0.4, key)).abs().max() <= 4
        assert crop.faults == []


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_large_jpeg_is_decoded_small_and_looks_the_same(scale, monkeypatch):
    decoded, original = [], decode._conversions
    monkeypatch.setattr(decode, "_conversions", lambda image: decoded.append(image.size) or original(image))
    size = 32
    image = ramp(size * scale * 3 // 2, size * scale * 3 // 2, blue=120)
    data = encoded(image, "jpeg", quality=95)
    for key in range(4):
        crop = decode_crop(data, (size, size), 0.8, key)
        reference = expected(image, (size, size), 0.8, key)
        assert (crop.pixels.float() - reference).abs().mean() < 3
        # What the crop says that it shows is what it shows, to a pixel.
        left, top, right, bottom = crop.box
        assert abs(crop.pixels[:, 0, 0].float().mean() / 255 - (left + (right - left) / 2 / size)) < 0.02
        assert abs(crop.pixels[0, :, 1].float().mean() / 255 - (top + (bottom - top) / 2 / size)) < 0.02
    assert decoded == [(size * 3 // 2, size * 3 // 2)] * 4


def test_a_grey_image_a_palette_and_transparency_become_rgb():
    shape = (30, 20)
    grey = decode_crop(encoded(ramp(*shape).convert("L")), (16, 16), 1.0, 0)
    assert (grey.pixels[..., 0] == grey.pixels[..., 2]).all()
    jpeg = decode_crop(encoded(ramp(*shape).convert("L"), "jpeg"), (16, 16), 1.0, 0)
    assert (jpeg.pixels.float() - grey.pixels.float()).abs().max() < 12
    palette = ramp(*shape).quantize(32)
    palette.info["transparency"] = bytes(range(32))
    for image in (palette, ramp(*shape).convert("RGBA"), ramp(*shape).convert("LA"), ramp(*shape).convert("1")):
        crop = decode_crop(encoded(image), (16, 16), 1.0, 0)
        assert crop.pixels.shape == (16, 16, 3)
        assert crop.faults == []


def test_cmyk_is_converted_and_counted():
    crop = decode_crop(encoded(ramp(40, 40, 80).convert("CMYK"), "jpeg", quality=95), (20, 20), 1.0, 0)
    assert crop.faults == [Fault.CMYK]
    assert (crop.pixels.float() - expected(ramp(40, 40, 80), (20, 20), 1.0, 0)).abs().mean() < 6


def test_sixteen_bits_are_scaled_to_eight_and_counted():
    deep = Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 164)
    crop = decode_crop(encoded(deep), (20, 20), 1.0, 0)
    assert crop.faults == [Fault.DEEP]
    # Cut at 255, as Pillow's own conversion would, all would be white.
    assert crop.pixels[0, 0, 0] == 0
    assert crop.pixels[-1, -1, 0] == 255
    assert 100 < crop.pixels[10].float().mean() < 160


@pytest.mark.parametrize("form", ["gif", "webp", "png"])
def test_of_an_animation_the_first_frame_is_shown_and_counted(form):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    crop = decode_crop(data, (16, 16), 1.0, 0)
    assert crop.faults == [Fault.ANIMATED]
    assert crop.pixels[..., 0].min() > 200
    assert crop.pixels[..., 2].max() < 50


def bomb(width: int, height: int) -> bytes:
    """A PNG that says that it is huge."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (encoded(ramp(200, 200), "jpeg")[:2000], Fault.TRUNCATED),
        (encoded(ramp(900, 900), "jpeg")[:9000], Fault.TRUNCATED),
        (encoded(ramp(60, 60))[:120], Fault.TRUNCATED),
        (b"", Fault.UNREADABLE),
        (b"<html>not found</html>", Fault.UNREADABLE),
        (b"\xff\xd8\xff\xe0" + b"\0" * 50, Fault.UNREADABLE),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, Fault.UNREADABLE),
        (bomb(20_000, 6_000), Fault.TOO_LARGE),
        (bomb(60_000, 60_000), Fault.TOO_LARGE),
    ],
    ids=["jpeg", "large jpeg", "png", "empty", "html", "no jpeg", "no png", "bomb", "large bomb"],
)
def test_what_cannot_be_shown_is_bad_for_a_reason(data, fault):
    with pytest.raises(BadSample) as caught:
        decode_crop(data, (32, 32), 0.9, 0)
    assert caught.value.fault is fault
    assert caught.value.detail
