from io import BytesIO

import pytest
import torch
from PIL import Image

from powerclip.report.heatmaps import COLUMNS, Panel, Row, heatmap_figure, overlay, png_bytes
from powerclip.runtime.files import write_atomic


def picture(figure):
    return Image.open(BytesIO(png_bytes(figure))).convert("RGB")


def row(panels, **kwargs):
    values = [Panel(f"phrase {k}", torch.rand(4, 4), (0.1, 0.1, 0.5, 0.5)) for k in range(panels)]
    return Row(torch.full((3, 32, 32), 128, dtype=torch.uint8), values, **kwargs)


def test_the_overlay_is_red_where_the_heatmap_is_high_and_blue_where_it_is_low():
    values = torch.zeros(2, 2)
    values[0, 1] = 1.0
    colours = overlay(torch.full((3, 64, 64), 128, dtype=torch.uint8), values)
    high, low = colours[2, -3], colours[-3, 2]
    assert high[0] > high[2] + 0.2
    assert low[2] > low[0]


def test_the_overlay_depends_on_the_order_of_values_not_on_their_size():
    image, values = torch.zeros(3, 16, 16, dtype=torch.uint8), torch.rand(4, 4)
    torch.testing.assert_close(overlay(image, values), overlay(image, 0.01 * values - 3), atol=0.02, rtol=0)


def test_each_row_and_each_panel_takes_its_place():
    one, two = picture(heatmap_figure([row(2)])), picture(heatmap_figure([row(2), row(3)]))
    assert two.width > one.width
    assert two.height == pytest.approx(2 * one.height, abs=2)


def test_many_phrases_wrap_to_further_lines():
    full, more = picture(heatmap_figure([row(COLUMNS)])), picture(heatmap_figure([row(COLUMNS + 1)]))
    assert more.width == full.width
    assert more.height > 1.9 * full.height


def test_a_row_that_continues_needs_no_room_for_titles():
    apart = picture(heatmap_figure([row(2), row(2)]))
    together = picture(heatmap_figure([row(2), row(2, continues=True)]))
    assert together.height < apart.height


def test_text_that_looks_like_mathematics_and_a_constant_heatmap_are_drawn():
    odd = Row(torch.zeros(3, 8, 8, dtype=torch.uint8), [Panel(r"costs $5 or $\frac", torch.ones(2, 2))], caption="$_$")
    assert picture(heatmap_figure([odd])).width > 0


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "new" / "image.png"
    write_atomic(target, b"old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomic(target, b"new")
    assert [path.name for path in target.parent.iterdir()] == ["image.png"]
    assert target.read_bytes() == b"old"
