"""Line charts as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from powerclip.report.charts import line_chart, smooth

COLOURS = {"CLIP": "#c2571a", "PowerCLIP": "#1f5fbf"}


def test_a_chart_is_valid_svg_with_a_line_for_each_model():
    curves = {"CLIP": [(1, 2.0), (2, 1.0)], "PowerCLIP": [(1, 2.0), (2, float("nan")), (3, 1.0), (4, 0.5)]}
    chart = ElementTree.fromstring(line_chart("loss <1>", curves, COLOURS))
    lines = [element.get("stroke") for element in chart if element.tag == "polyline"]
    # The value that is not finite cuts its line in two.
    assert lines == [COLOURS["CLIP"], COLOURS["PowerCLIP"], COLOURS["PowerCLIP"]]


def test_a_chart_keeps_its_points_inside_the_frame_and_higher_values_higher():
    chart = ElementTree.fromstring(line_chart("t", {"CLIP": [(0, 0.0), (5, 7.3), (10, 3.0)]}, COLOURS))
    width, height = (float(x) for x in chart.get("viewBox").split()[2:])
    line = next(element for element in chart if element.tag == "polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert all(0 < x < width and 0 < y < height for x, y in points)
    assert points[1][1] < points[2][1] < points[0][1]


def test_a_chart_of_nothing_is_left_out():
    assert line_chart("t", {"CLIP": []}, COLOURS) == ""


def test_smoothing_is_a_running_mean():
    assert smooth([(1, 1.0), (2, 3.0), (3, 8.0)], window=2) == [(1, 1.0), (2, 2.0), (3, 5.5)]
