"""One table for everything that shows numbers: on a terminal, in Markdown, LaTeX and HTML.

All tables rank by `rank` and round by `fixed`: values are ranked as they are shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Literal

from rich import box as boxes
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from powerclip.runtime.progress import print_line

Mark = Literal["", "best", "second"]

NOTHING = "–"  # shown for a value that was not measured
WIDE = 12  # columns beyond which a LaTeX table is scaled to the page

_TERMINAL = {"best": "bold", "second": "underline", "": ""}
_MARKDOWN = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
_LATEX = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
_HTML = {"best": "<b>{}</b>", "second": "<u>{}</u>", "": "{}"}


@dataclass(frozen=True)
class Column:
    """A column of values."""

    label: str
    group: str = ""  # what neighbouring columns share: written above them in LaTeX and HTML
    short: str = ""  # the label below the group's name
    css: str = ""  # class of its head and cells in HTML


@dataclass(frozen=True)
class Cell:
    """A value as it is shown."""

    text: str
    mark: Mark = ""
    css: str = ""


@dataclass(frozen=True)
class Row:
    """What one method, setting or measure has."""

    label: str
    cells: Sequence[Cell]
    section: str = ""  # neighbouring rows of the same section stand under its name
    published: bool = False  # marked with a dagger: copied from a publication, not measured
    css: str = ""

    @property
    def marked_label(self) -> str:
        """The label, with a dagger where the row was published elsewhere."""
        return f"{self.label}†" if self.published else self.label


@dataclass(frozen=True)
class Table:
    """A title, columns, rows and notes, printable in four formats."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    corner: str = ""  # the head of the column of row labels
    notes: Sequence[str] = ()

    @classmethod
    def plain(cls, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
        """A table of values as they are; the first of each row is its label."""
        corner, *labels = heads
        return cls(
            columns=[Column(label) for label in labels],
            rows=[Row(str(label), [Cell(str(value)) for value in values]) for label, *values in rows],
            corner=corner,
        )

    def print(self, console: Console, *, boxed: bool = False) -> None:
        """Print it, as wide as it is: on a narrower terminal lines run on instead of losing numbers."""
        shown = self.terminal(boxed=boxed)
        unlimited = console.options.update(max_width=100_000)
        shown.width = console.measure(shown, options=unlimited).maximum
        console.print(shown, highlight=False, crop=False, no_wrap=True, overflow="ignore")
        for note in self.notes:
            print_line(console, note)

    def terminal(self, *, boxed: bool = False) -> RichTable:
        """The table for `rich`; `boxed` draws lines around cells and between sections."""
        table = RichTable(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            box=boxes.HEAVY_HEAD if boxed else None,
            pad_edge=boxed,
            padding=(0, 1) if boxed else (0, 2, 0, 0),
            header_style="bold" if boxed else "",
        )
        table.add_column(Text(self.corner), no_wrap=True)
        for column in self.columns:
            table.add_column(Text(column.label), justify="right", no_wrap=True)
        for section, rows in self._sections():
            if section:
                table.add_section()
                table.add_row(Text(section, "bold"))
            for row in rows:
                label = f"  {row.marked_label}" if section else row.marked_label
                # Assembled, so that the padding before a value is not underlined with it.
                cells = [Text.assemble((cell.text, _TERMINAL[cell.mark])) for cell in row.cells]
                table.add_row(Text(label), *cells)
        return table

    def markdown(self) -> str:
        """A heading where there is a title, the table, its notes."""
        heads = [self.corner, *(column.label for column in self.columns)]
        lines = [_markdown_line(map(_markdown, heads)), "|---" + "|---:" * len(self.columns) + "|"]
        for section, rows in self._sections():
            if section:
                lines.append(_markdown_line([f"**{_markdown(section)}**", *([""] * len(self.columns))]))
            for row in rows:
                cells = [_MARKDOWN[cell.mark].format(_markdown(cell.text)) for cell in row.cells]
                lines.append(_markdown_line([_markdown(row.marked_label), *cells]))
        head = [f"### {self.title}"] if self.title else []
        return "\n\n".join([*head, "\n".join(lines), *self.notes])

    def latex(self, caption: str | None = None) -> str:
        """A `table*` around a `tabular` for `booktabs`; a wide one is scaled to the page (`graphicx`).

        `caption` replaces the title, as LaTeX numbers tables itself.
        """
        count = len(self.columns) + 1
        wide = count > WIDE
        heads = [self.corner, *(column.short or column.label for column in self.columns)]
        lines = [
            r"\begin{table*}",
            r"\centering\small",
            *([r"\resizebox{\textwidth}{!}{%"] if wide else []),
            rf"\begin{{tabular}}{{l{'c' * (count - 1)}}}",
            r"\toprule",
            *self._latex_groups(),
            " & ".join(map(_latex, heads)) + r" \\",
        ]
        for section, rows in self._sections():
            lines.append(r"\midrule")
            if section:
                lines.append(rf"\multicolumn{{{count}}}{{l}}{{\textbf{{{_latex(section)}}}}} \\")
            for row in rows:
                label = _latex(row.label) + (r"$^\dagger$" if row.published else "")
                cells = [_LATEX[cell.mark].format(_latex(cell.text)) for cell in row.cells]
                lines.append(" & ".join([label, *cells]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}}" if wide else r"\end{tabular}"]
        text = self.title if caption is None else caption
        lines += [rf"\caption{{{_latex(text)}}}"] if text else []
        return "\n".join([*lines, r"\end{table*}", *(f"% {note}" for note in self.notes)])

    def html(self) -> str:
        """The table in a frame that scrolls, then its notes; a heading where there is a title."""
        starts = self._group_starts()
        heads = [escape(self.corner), *(escape(column.short or column.label) for column in self.columns)]
        classes = ["", *self._html_classes([column.css for column in self.columns], starts)]
        head = "".join(f"<th{kind}>{text}</th>" for kind, text in zip(classes, heads, strict=True))
        lines = []
        for section, rows in self._sections():
            if section:
                lines.append(f'<tr class="section"><td colspan="{len(heads)}">{escape(section)}</td></tr>')
            for row in rows:
                styles = [cell.css or column.css for cell, column in zip(row.cells, self.columns, strict=True)]
                cells = "".join(
                    f"<td{kind}>{_HTML[cell.mark].format(escape(cell.text))}</td>"
                    for cell, kind in zip(row.cells, self._html_classes(styles, starts), strict=True)
                )
                kind = f' class="{row.css}"' if row.css else ""
                lines.append(f"<tr{kind}><td>{escape(row.marked_label)}</td>{cells}</tr>")
        body = "\n".join(lines)
        table = f"<table><thead>{self._html_groups()}<tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
        title = f"<h2>{escape(self.title)}</h2>\n" if self.title else ""
        notes = "".join(f'\n<p class="note">{escape(note)}</p>' for note in self.notes)
        return f'{title}<div class="scroll">{table}</div>{notes}'

    def _sections(self) -> Iterator[tuple[str, list[Row]]]:
        for section, rows in groupby(self.rows, lambda row: row.section):
            yield section, list(rows)

    def _groups(self) -> list[tuple[str, int]]:
        """Neighbours that share a group, and how many they are; a column without one stands alone."""
        runs: list[tuple[str, int]] = []
        for column in self.columns:
            if column.group and runs and runs[-1][0] == column.group:
                runs[-1] = (column.group, runs[-1][1] + 1)
            else:
                runs.append((column.group, 1))
        return runs

    def _group_starts(self) -> set[int]:
        """The numbers of the columns that a group begins with."""
        starts, position = set(), 0
        for name, count in self._groups():
            if name:
                starts.add(position)
            position += count
        return starts

    def _html_classes(self, names: Sequence[str], starts: set[int]) -> list[str]:
        classes = [" ".join(filter(None, [name, "start" * (k in starts)])) for k, name in enumerate(names)]
        return [f' class="{name}"' if name else "" for name in classes]

    def _html_groups(self) -> str:
        groups = self._groups()
        if not any(name for name, _ in groups):
            return ""
        cells = "".join(
            f'<th class="group" colspan="{count}">{escape(name)}</th>' if name else "<th></th>"
            for name, count in groups
        )
        return f"<tr><th></th>{cells}</tr>"

    def _latex_groups(self) -> list[str]:
        """The line above the heads that names the groups, and the rules below it."""
        groups = self._groups()
        if not any(name for name, _ in groups):
            return []
        cells, rules, position = [""], [], 2
        for name, count in groups:
            cells.append(rf"\multicolumn{{{count}}}{{c}}{{{_latex(name)}}}")
            if name:
                rules.append(rf"\cmidrule(lr){{{position}-{position + count - 1}}}")
            position += count
        return [" & ".join(cells) + r" \\", "".join(rules)]


def fixed(value: float | None, digits: int = 1) -> str:
    """A value with so many decimals, halves away from zero as printed tables have them; a dash for None."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    # The small number makes up for decimals that a float cannot hold: 0.15 is a little less than that.
    rounded = math.floor(abs(value) * 10**digits + 0.5 + 1e-9) / 10**digits
    return f"{math.copysign(rounded, value) if rounded else 0.0:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """A difference with its sign and a true minus; one that rounds to nothing has none."""
    text = fixed(value, digits)
    if not text.strip("-0."):
        return text
    return text.replace("-", "−") if text.startswith("-") else f"+{text}"


def rank(values: Sequence[float | None], digits: int = 1) -> list[Mark]:
    """The mark of each value, by what is shown of it; equal ones share it.

    Where all that were measured are level, none is ahead. Of two, the second is the last and has no mark.
    """
    measured = [float(fixed(value, digits)) for value in values if value is not None]
    distinct = sorted(set(measured), reverse=True)
    if len(distinct) < 2:
        return [""] * len(values)
    marks: dict[float, Mark] = {distinct[0]: "best"}
    if len(measured) > 2:
        marks[distinct[1]] = "second"
    return ["" if value is None else marks.get(float(fixed(value, digits)), "") for value in values]


def _markdown_line(cells: Sequence[str] | Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    return text.replace("|", "\\|")


def _latex(text: str) -> str:
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "±": r"$\pm$"}
    return re.sub(r"[\\~^&%$#_{}–±]", lambda match: named.get(match[0], f"\\{match[0]}"), text)
