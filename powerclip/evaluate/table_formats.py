"""Tables as Markdown, LaTeX and HTML: best bold, second underlined, published rows marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from powerclip.errors import UserError
from powerclip.evaluate.tables import Table

NOTE = "Percent. Best bold, second underlined, by the values as shown. † as published in the paper, not measured here."
_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#1b1f24}
table{border-collapse:collapse;margin:.5rem 0 2rem}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left}
thead th{white-space:normal;border-bottom:2px solid #1b1f24;vertical-align:bottom}tr.ours{background:#e0f7fa}
div{overflow-x:auto}h2{font-size:1rem}td b{font-weight:700}"""


def markdown(tables: Sequence[Table]) -> str:
    """One table after the other, and how often each method leads."""
    marks = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    parts = []
    for table in tables:
        header = ["Method", *(column.label for column in table.columns), "Wins"]
        lines = [f"### {table.title}", "", f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
        for row, cells in table.cells():
            shown = [marks[cell.mark].format(cell.text) for cell in cells]
            name = row.name.replace("|", "\\|") + ("†" if row.published else "")
            lines.append(f"| {' | '.join([name, *shown, str(table.wins()[row.name])])} |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, f"{wins_line(tables)}\n\n{NOTE}"]) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """`tabular`s for `booktabs`, with a `table*` around each."""
    marks = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
    parts = []
    for table in tables:
        header = ["Method", *(_tex(column.label) for column in table.columns), "Wins"]
        lines = [
            r"\begin{table*}",
            r"\centering\small",
            rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
        ]
        for row, cells in table.cells():
            name = _tex(row.name) + (r"$^\dagger$" if row.published else "")
            shown = [marks[cell.mark].format(cell.text.replace("–", "--")) for cell in cells]
            lines.append(" & ".join([name, *shown, str(table.wins()[row.name])]) + r" \\")
        caption = _tex(f"{table.title}.").replace("†", r"$^\dagger$")
        lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table*}"]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "% " + NOTE]) + "\n"


def html(tables: Sequence[Table]) -> str:
    """A page of its own."""
    marks = {"best": "<b>{}</b>", "second": "<u>{}</u>", "": "{}"}
    parts = []
    for table in tables:
        head = "".join(f"<th>{escape(text)}</th>" for text in ["Method", *(c.label for c in table.columns), "Wins"])
        body = ""
        for row, cells in table.cells():
            shown = [escape(row.name) + ("†" if row.published else ""), *(marks[c.mark].format(c.text) for c in cells)]
            values = "".join(f"<td>{text}</td>" for text in [*shown, str(table.wins()[row.name])])
            body += f"<tr{'' if row.published else ' class=ours'}>{values}</tr>\n"
        whole = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
        parts.append(f"<h2>{escape(table.title)}</h2>\n<div>{whole}</div>")
    foot = f"<p>{escape(wins_line(tables))}</p><p>{escape(NOTE)}</p>"
    title = "<title>Results beside the paper's</title>"
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{title}<style>{_STYLE}</style>\n' + "\n".join(
        [*parts, foot, "</html>\n"]
    )


def wins_line(tables: Sequence[Table]) -> str:
    """`Wins in 47 columns: PowerCLIP-S† 35, …`, the most first."""
    total: dict[str, int] = {}
    columns = sum(1 for table in tables for column in table.columns if not column.over)
    for table in tables:
        shown = {row.name: row.name + ("†" if row.published else "") for row in table.rows}
        for name, count in table.wins().items():
            total[shown[name]] = total.get(shown[name], 0) + count
    listed = sorted(total.items(), key=lambda item: -item[1])
    return f"Wins in {columns} columns: " + ", ".join(f"{name} {count}" for name, count in listed) + "."


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"md": markdown, "tex": latex, "html": html}


def render(tables: Sequence[Table], form: str) -> str:
    """The tables in one of `FORMATS`.

    Raises:
        UserError: there is no such format.
    """
    if form not in FORMATS:
        raise UserError(f"there is no format {form!r} for tables; known: {', '.join(FORMATS)}")
    return FORMATS[form](tables)


def _tex(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, f"\\{character}")
    return text
