"""One table in four formats: the same cells and marks in each, ranked by what is shown."""

from __future__ import annotations

import io
from html.parser import HTMLParser

import pytest
from rich.console import Console

from powerclip.report.table import Cell, Column, Row, Table, fixed, rank, signed

TABLE = Table(
    columns=[Column("first"), Column("both R@1", "both", "R@1"), Column("both R@5", "both", "R@5", css="faint")],
    rows=[
        Row("a & b|c", [Cell("1.0"), Cell("2.0", "best"), Cell("–")], section="One", published=True),
        Row("d_e", [Cell("3.0"), Cell("1.0 ± 0.5", "second"), Cell("9 < 10")], section="One", css="mean"),
        Row("f", [Cell("5.0"), Cell("0.0"), Cell("")], section="Two"),
    ],
    title="A title of 100%",
    corner="method",
    notes=["What it means."],
)


def printed(table: Table, width: int = 200, **options: bool) -> list[str]:
    stream = io.StringIO()
    table.print(Console(file=stream, width=width), **options)
    return stream.getvalue().splitlines()


def test_markdown_has_a_line_for_each_row_and_section_and_escapes_bars():
    assert TABLE.markdown() == "\n".join(
        [
            "### A title of 100%",
            "",
            "| method | first | both R@1 | both R@5 |",
            "|---|---:|---:|---:|",
            "| **One** |  |  |  |",
            r"| a & b\|c† | 1.0 | **2.0** | – |",
            "| d_e | 3.0 | <u>1.0 ± 0.5</u> | 9 < 10 |",
            "| **Two** |  |  |  |",
            "| f | 5.0 | 0.0 |  |",
            "",
            "What it means.",
        ]
    )


def test_latex_names_groups_and_sections_and_escapes_what_it_would_read_as_commands():
    assert TABLE.latex().splitlines() == [
        r"\begin{table*}",
        r"\centering\small",
        r"\begin{tabular}{lccc}",
        r"\toprule",
        r" & \multicolumn{1}{c}{} & \multicolumn{2}{c}{both} \\",
        r"\cmidrule(lr){3-4}",
        r"method & first & R@1 & R@5 \\",
        r"\midrule",
        r"\multicolumn{4}{l}{\textbf{One}} \\",
        r"a \& b|c$^\dagger$ & 1.0 & \textbf{2.0} & -- \\",
        r"d\_e & 3.0 & \underline{1.0 $\pm$ 0.5} & 9 < 10 \\",
        r"\midrule",
        r"\multicolumn{4}{l}{\textbf{Two}} \\",
        r"f & 5.0 & 0.0 &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\caption{A title of 100\%}",
        r"\end{table*}",
        "% What it means.",
    ]
    assert r"\caption{Another.}" in TABLE.latex("Another.")


class Nesting(HTMLParser):
    """Collects the text of cells, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data


def test_html_has_every_cell_and_is_well_formed():
    page = TABLE.html()
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []
    heads = ["", "", "both", "method", "first", "R@1", "R@5"]
    body = ["One", "a & b|c†", "1.0", "2.0", "–", "d_e", "3.0", "1.0 ± 0.5", "9 < 10", "Two", "f", "5.0", "0.0", ""]
    assert nesting.cells == heads + body
    assert '<th class="group" colspan="2">both</th>' in page
    assert '<th class="start">R@1</th><th class="faint">R@5</th>' in page
    assert '<td class="start"><b>2.0</b></td><td class="faint">–</td>' in page
    assert '<tr class="mean"><td>d_e</td>' in page
    assert "<h2>A title of 100%</h2>" in page
    assert '<p class="note">What it means.</p>' in page


def test_a_terminal_gets_every_number_however_narrow_it_is():
    wide, narrow = printed(TABLE), printed(TABLE, width=20)
    assert [line.rstrip() for line in wide] == [line.rstrip() for line in narrow]
    assert wide[1].split("  ")[0] == "method"
    assert [line.split() for line in wide[-3:-1]] == [["Two"], ["f", "5.0", "0.0"]]
    assert len({len(line) for line in wide[1:-1]}) == 1  # aligned
    boxed = printed(TABLE, boxed=True)
    assert boxed[-3].split() == ["│", "f", "│", "5.0", "│", "0.0", "│", "│"]


def test_marks_on_a_terminal_cover_the_value_and_not_its_padding():
    stream = io.StringIO()
    TABLE.print(Console(file=stream, width=200, force_terminal=True, color_system="standard"))
    assert " \x1b[1m2.0\x1b[0m" in stream.getvalue()
    assert "  \x1b[4m1.0 ± 0.5\x1b[0m" in stream.getvalue()


def test_names_are_not_read_as_markup():
    assert printed(Table.plain(["[bold]x", "y"], [["[red]z", 1]])) == ["[bold]x  y", "[red]z   1"]


def test_a_plain_table_takes_values_as_they_are():
    assert Table.plain(["", "n"], [["a", 1], ["b", None]]).markdown() == "|  | n |\n|---|---:|\n| a | 1 |\n| b | None |"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.25, 1, "0.3"), (12.25, 1, "12.3"), (70.349, 1, "70.3"), (0.15, 1, "0.2"), (-0.25, 1, "-0.3"), (-0.04, 1, "0.0"),
     (2.675, 2, "2.68"), (140.5, 0, "141"), (None, 1, "–"), (float("nan"), 1, "nan")],
)  # fmt: skip
def test_halves_are_rounded_away_from_zero(value, digits, text):
    assert fixed(value, digits) == text


@pytest.mark.parametrize(("value", "text"), [(1.26, "+1.3"), (-0.5, "−0.5"), (-0.04, "0.0"), (0.0, "0.0")])
def test_differences_carry_their_sign(value, text):
    assert signed(value) == text


def test_ranks_go_by_what_is_shown_and_ties_share_them():
    assert rank([70.34, 70.26, None, 71.0, 60.0]) == ["second", "second", "", "best", ""]
    assert rank([5.0]) == [""]
    assert rank([5.0, None, 6.0]) == ["", "", "best"]  # the second of two is the last
    assert rank([5.0, 5.0, 4.0]) == ["best", "best", "second"]
    assert rank([5.0, 5.04, None]) == ["", "", ""]  # level: none is ahead
    assert rank([5.0, 5.04], digits=2) == ["", "best"]
