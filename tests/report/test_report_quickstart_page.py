import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from powerclip.compare.comparison import Line, Outcome, compare, show
from powerclip.evaluate.metrics import CUTOFFS, KINDS
from powerclip.report.charts import line_chart, smooth
from powerclip.report.quickstart_page import COLOURS, Report, render, signed, verdict


def outcome(score, seconds=10.0):
    recalls = [f"retrieval/{side}_retrieval_recall@{k}" for side in ("text", "image") for k in CUTOFFS]
    kinds = [f"composition/{kind}/acc" for kind in KINDS]
    points = [f"pointing/pointing_{way}{which}" for way in ("words", "text") for which in ("", "_any")]
    scores = dict.fromkeys(
        [*recalls, "zero_shot/acc1", "zero_shot/acc5", *kinds, "composition/mean_kind_acc", *points], score
    )
    scores |= {"pointing/pointing_chance": 0.07, "pointing/pointing_chance_any": 0.2}
    counts = {"retrieval": 200, "zero_shot": 100, "classes": 10, "composition": 700, "pointing": 400}
    return Outcome(scores, counts, seconds)


def report(lines, **changes):
    settings = {
        "lines": lines,
        "curves": {"CLIP loss": {"CLIP": [(1, 4.0), (2, 3.0)], "PowerCLIP-R": [(1, 4.0), (2, 2.5)]}},
        "heatmaps": b"png",
        "regions": 10,
        "steps": 250,
        "batch_size": 128,
        "parameters": 7_000_000,
        "seeds": [0],
        "counts": outcome(0.5).counts,
        "machine": "a <machine>",
        "command": "powerclip quickstart",
    }
    return Report(**{**settings, **changes})


def test_every_measure_of_the_evaluation_is_a_line_with_its_chance_level():
    lines = {(line.group, line.label): line for line in compare([outcome(0.5)], [outcome(0.6)])}
    assert len(lines) == 6 + 2 + 8 + 4 + 1
    assert lines["Retrieval", "image → text, R@5"].chance == pytest.approx(2.5)
    assert lines["Zero-shot", "unseen pairs, top 1"].chance == pytest.approx(10)
    assert lines["Pointing game", "in caption: its own"].chance == pytest.approx(7)
    assert lines["Pointing game", "in caption: any"].chance == pytest.approx(20)
    assert all(line.difference == pytest.approx(10) for line in lines.values() if line.unit == "%")


def test_whoever_is_ahead_is_named_and_a_draw_as_printed_is_a_draw():
    def line(ours, unit="%"):
        return Line("g", "l", unit, None, (50.0,), (ours,))

    assert [line(v).ahead for v in (50.2, 49.8, 50.04, 49.96)] == ["ours", "baseline", "", ""]
    assert line(99.0, unit="s").ahead == ""


def test_several_seeds_show_mean_and_sample_deviation():
    assert show([50.0]) == "50.0"
    assert show([49.0, 50.0, 51.0]) == "50.0 ± 1.0"
    assert show([140.4, 142.4], "s") == "141 ± 1 s"


def test_models_with_different_numbers_of_seeds_are_not_compared():
    with pytest.raises(ValueError, match="2 outcomes"):
        compare([outcome(0.5)] * 2, [outcome(0.5)])


def test_the_verdict_counts_for_both_sides():
    assert "ahead on 0 and" in verdict(compare([outcome(0.6)], [outcome(0.5)]))
    assert "on 20" in verdict(compare([outcome(0.6)], [outcome(0.5)]))
    assert "20 are level" in verdict(compare([outcome(0.5)], [outcome(0.5)]))


@pytest.mark.parametrize(("value", "text"), [(1.26, "+1.3"), (-0.5, "−0.5"), (-0.04, "0.0"), (0.0, "0.0")])
def test_differences_carry_their_sign(value, text):
    assert signed(value) == text
    assert signed(22.6, "s") == "+23 s"
    assert signed(-0.3, "s") == "0 s"


class Links(HTMLParser):
    """Collects what a page would load, and checks that its tags nest."""

    def __init__(self):
        super().__init__()
        self.loads, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("line", "polyline"):
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing_from_outside():
    page = render(report(compare([outcome(0.5)], [outcome(0.6)])))
    links = Links()
    links.feed(page)
    assert links.open == []
    assert [link[:22] for link in links.loads] == ["data:image/png;base64,"]
    assert not re.search(r"https?://|@import|url\(", page)
    assert "a &lt;machine&gt;" in page


def test_the_page_shows_the_numbers_of_both_models():
    page = render(report(compare([outcome(0.412)], [outcome(0.523)])))
    assert "<td>41.2</td>" in page
    assert '<td class="best">52.3</td>' in page
    assert '<td class="ours">+11.1</td>' in page
    assert "seed 0" in page


def test_a_chart_is_valid_svg_with_a_line_for_each_model():
    curves = {"CLIP": [(1, 2.0), (2, 1.0)], "PowerCLIP-R": [(1, 2.0), (2, float("nan")), (3, 1.0), (4, 0.5)]}
    chart = ElementTree.fromstring(line_chart("loss <1>", curves, COLOURS))
    lines = [element.get("stroke") for element in chart if element.tag == "polyline"]
    # The value that is not finite cuts its line in two.
    assert lines == [COLOURS["CLIP"], COLOURS["PowerCLIP-R"], COLOURS["PowerCLIP-R"]]


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
