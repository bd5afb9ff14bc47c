"""Tables as Markdown, LaTeX and HTML: best bold, second underlined, published rows marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from powerclip.errors import UserError
from powerclip.evaluate.paper_tables import Column, Table

NOTE = "Percent. Best bold, second of three or more underlined, by the values as shown."
DAGGER = " † as published in the paper, not measured here."
_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#1b1f24}
table{border-collapse:collapse;margin:.5rem 0 2rem;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .42rem;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
thead th{vertical-align:bottom}thead tr:last-child th{border-bottom:2px solid #1b1f24}
thead th.group{text-align:center;border-bottom:1px solid #9ca3af}.start{padding-left:1.1rem}
tr.ours td,tr.ours td:first-child{background:#e0f7fa}
div{overflow-x:auto}h2{font-size:1rem}td b{font-weight:700}"""
WIDE = 12  # columns beyond which a LaTeX table is scaled to the page


def markdown(tables: Sequence[Table]) -> str:
    """One table after the other, and how often each method leads."""
    marks = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    parts = []
    for table in tables:
        header = ["Method", *(_md(column.label) for column in table.columns), "Wins"]
        lines = [f"### {table.title}", "", f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
        for row, cells in table.cells():
            shown = [marks[cell.mark].format(cell.text) for cell in cells]
            name = _md(row.name) + ("†" if row.published else "")
            lines.append(f"| {' | '.join([name, *shown, str(table.wins()[row.name])])} |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, f"{wins_line(tables)}\n\n{note(tables)}"]) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """`tabular`s for `booktabs`, with a `table*` around each; wide ones are scaled to the page (`graphicx`)."""
    marks = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
    parts = ["% needs \\usepackage{booktabs,graphicx}"]
    for table in tables:
        columns = len(table.columns) + 2
        wide = columns > WIDE
        lines = [
            r"\begin{table*}",
            r"\centering\small",
            *([r"\resizebox{\textwidth}{!}{%"] if wide else []),
            rf"\begin{{tabular}}{{l{'c' * (columns - 1)}}}",
            r"\toprule",
            *_tex_groups(table),
            " & ".join(["Method", *(_tex(column.part or column.label) for column in table.columns), "Wins"]) + r" \\",
            r"\midrule",
        ]
        for row, cells in table.cells():
            name = _tex(row.name) + (r"$^\dagger$" if row.published else "")
            shown = [marks[cell.mark].format(cell.text.replace("–", "--")) for cell in cells]
            lines.append(" & ".join([name, *shown, str(table.wins()[row.name])]) + r" \\")
        # LaTeX numbers its tables itself.
        caption = _tex(re.sub(r"^(Table \d+)\. (.*)", r"\2. The paper's \1", table.title) + ".")
        end = r"\end{tabular}}" if wide else r"\end{tabular}"
        lines += [r"\bottomrule", end, rf"\caption{{{caption}}}", r"\end{table*}"]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "% " + note(tables)]) + "\n"


def html(tables: Sequence[Table]) -> str:
    """A page of its own."""
    marks = {"best": "<b>{}</b>", "second": "<u>{}</u>", "": "{}"}
    parts = []
    for table in tables:
        starts = _starts(table.columns)
        body = ""
        for row, cells in table.cells():
            name = escape(row.name) + ("†" if row.published else "")
            values = f"<td>{name}</td>" + "".join(
                f"<td{_class(place in starts)}>{marks[cell.mark].format(cell.text)}</td>"
                for place, cell in enumerate(cells)
            )
            body += f"<tr{'' if row.published else ' class=ours'}>{values}<td>{table.wins()[row.name]}</td></tr>\n"
        whole = f"<table><thead>{_html_head(table.columns, starts)}</thead><tbody>\n{body}</tbody></table>"
        parts.append(f"<h2>{escape(table.title)}</h2>\n<div>{whole}</div>")
    foot = f"<p>{escape(wins_line(tables))}</p><p>{escape(note(tables))}</p>"
    title = "<title>Results beside the paper's</title>"
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{title}<style>{_STYLE}</style>\n' + "\n".join(
        [*parts, foot, "</html>\n"]
    )


def _groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Neighbours that share a group, and how many they are; a column without one stands alone."""
    runs: list[tuple[str, int]] = []
    for column in columns:
        if column.group and runs and runs[-1][0] == column.group:
            runs[-1] = (column.group, runs[-1][1] + 1)
        else:
            runs.append((column.group, 1))
    return runs


def _starts(columns: Sequence[Column]) -> set[int]:
    """The places where a group begins."""
    places, place = set(), 0
    for name, count in _groups(columns):
        if name:
            places.add(place)
        place += count
    return places


def _html_head(columns: Sequence[Column], starts: set[int]) -> str:
    cells = "".join(
        f"<th{_class(place in starts)}>{escape(column.part or column.label)}</th>"
        for place, column in enumerate(columns)
    )
    above = ""
    if starts:
        above = "".join(
            f'<th class="group" colspan="{count}">{escape(name)}</th>' if name else "<th></th>" * count
            for name, count in _groups(columns)
        )
        above = f"<tr><th></th>{above}<th></th></tr>"
    return f"{above}<tr><th>Method</th>{cells}<th>Wins</th></tr>"


def _class(start: bool) -> str:
    return ' class="start"' if start else ""


def _tex_groups(table: Table) -> list[str]:
    """The line above the header that names the groups, and the rules below it."""
    runs = _groups(table.columns)
    if not any(name for name, _ in runs):
        return []
    cells, rules, place = [""], [], 2
    for name, count in runs:
        cells.append(rf"\multicolumn{{{count}}}{{c}}{{{_tex(name)}}}")
        if name:
            rules.append(rf"\cmidrule(lr){{{place}-{place + count - 1}}}")
        place += count
    return [" & ".join([*cells, ""]) + r" \\", "".join(rules)]


def wins_line(tables: Sequence[Table]) -> str:
    """`Wins in 47 columns: PowerCLIP-S† 35, …`, the most first."""
    total: dict[str, int] = {}
    counted = [table for table in tables if table.counted] or list(tables)
    columns = sum(1 for table in counted for column in table.columns if not column.over)
    for table in counted:
        shown = {row.name: row.name + ("†" if row.published else "") for row in table.rows}
        for name, count in table.wins().items():
            total[shown[name]] = total.get(shown[name], 0) + count
    listed = sorted(total.items(), key=lambda item: -item[1])
    return f"Wins in {columns} columns: " + ", ".join(f"{name} {count}" for name, count in listed) + "."


def note(tables: Sequence[Table]) -> str:
    """What the marks mean, of those that are there."""
    return NOTE + (DAGGER if any(row.published for table in tables for row in table.rows) else "")


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"md": markdown, "tex": latex, "html": html}


def render(tables: Sequence[Table], form: str) -> str:
    """The tables in one of `FORMATS`.

    Raises:
        UserError: there is no such format.
    """
    if form not in FORMATS:
        raise UserError(f"there is no format {form!r} for tables; known: {', '.join(FORMATS)}")
    return FORMATS[form](tables)


def _md(text: str) -> str:
    return text.replace("|", "\\|")


def _tex(text: str) -> str:
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^&%$#_{}]", lambda found: named.get(found[0], f"\\{found[0]}"), text)
