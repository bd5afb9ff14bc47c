"""The quickstart's report: well-formed, self-contained, with the numbers of both models."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from powerclip.report.quickstart_page import Report, render, verdict
from powerclip.report.table import Cell, Column, Row, Table

TABLE = Table(
    [Column("chance", css="faint"), Column("CLIP", css="clip"), Column("PowerCLIP"), Column("difference")],
    [Row("R@1", [Cell("0.1"), Cell("41.2"), Cell("52.3", "best"), Cell("+11.1", css="ahead-powerclip")], "Retrieval")],
)


def report(**changes: Any) -> Report:
    settings: dict[str, Any] = {
        "table": TABLE,
        "measures": 20,
        "ahead": {"CLIP": 5, "PowerCLIP": 14},
        "curves": {"CLIP loss": {"CLIP": [(1, 4.0), (2, 3.0)], "PowerCLIP": [(1, 4.0), (2, 2.5)]}},
        "heatmaps": b"png",
        "regions": 10,
        "steps": 250,
        "batch_size": 128,
        "parameters": 7_000_000,
        "seeds": [0],
        "counts": {"scenes": 200, "zero_shot_images": 100, "classes": 10, "comparisons": 700, "phrases": 400},
        "machine": "a <machine>",
        "command": "powerclip quickstart",
    }
    return Report(**{**settings, **changes})


def test_the_verdict_counts_for_both_sides():
    assert "of 20 measures" in verdict(20, {"CLIP": 5, "PowerCLIP": 14})
    assert verdict(20, {"CLIP": 5, "PowerCLIP": 14}).endswith('on 14 and <b class="clip">CLIP</b> on 5; 1 is level.')
    assert "20 are level" in verdict(20, {"CLIP": 0, "PowerCLIP": 0})
    assert "level" not in verdict(20, {"CLIP": 6, "PowerCLIP": 14})


class Links(HTMLParser):
    """Collects what a page would load, and checks that its tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str | None] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("line", "polyline"):
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing_from_outside():
    page = render(report())
    links = Links()
    links.feed(page)
    assert links.open == []
    assert [link[:22] for link in links.loads] == ["data:image/png;base64,"]
    assert not re.search(r"https?://|@import|url\(", page)
    assert "a &lt;machine&gt;" in page


def test_the_page_shows_the_table_the_curves_and_what_they_were_made_on():
    page = render(report())
    assert TABLE.html() in page
    assert '<td class="ahead-powerclip">+11.1</td>' in page
    assert page.count("<svg") == 1
    assert "10 regions make 2<sup>10</sup> sets" in page
    assert "700 comparisons" in page
    assert "seed 0" in page
    assert "over 3 seeds" in render(report(seeds=[0, 1, 2]))
