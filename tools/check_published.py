"""Every published number of `powerclip/evaluate/published.json` beside the paper's LaTeX.

    python tools/check_published.py PAPER.tex

The paper itself is not part of the project. Prints each difference, and how many numbers were compared; fails when any
differs or a row is not found.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).resolve().parents[1] / "powerclip" / "evaluate" / "published.json"
LABELS = {
    "classification": "tab:results_zero-shot_classification",
    "retrieval": "tab:results_zero-shot_retrieval",
    "robustness": "tab:results_robustness",
    "sugarcrepe": "tab:results_compositionality",
    "winoground": "tab:results_winoground",
    "probe": "tab:linear_probing",
    "sugarcrepe_kinds": "app:tab:results_compositionality",
    "6": "tab:ablation",
    "7": "tab:mask",
    "8": "tab:activation",
    "10": "tab:hyperparameter",
    "13": "tab:appendix_train_time",
    "14": "tab:lambda_ablation",
    "unified": "tab:detailed_unified_powerclip",
    "detection": "tab:ov_detection",
}
Row = tuple[str, list[float]]


def main() -> int:
    """Compare, and say what differs."""
    content = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    printed = read_tables(Path(sys.argv[1]).read_text(encoding="utf-8"))
    wrong: list[str] = []
    compared = 0
    for key, rows in ours(content):
        theirs = list(printed[LABELS[key]])
        for row in rows:
            compared += len(row[1])
            if row in theirs:
                theirs.remove(row)
            else:
                wrong.append(f"{key}: {row[0]} {row[1]} is not in the paper, which has {theirs}")
        wrong += [f"{key}: {row[0]} {row[1]} of the paper is missing" for row in theirs]
    print("\n".join([*wrong, f"{compared} numbers compared, {len(wrong)} rows differ"]))
    return 1 if wrong else 0


def ours(content: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """Our key of each table and its rows."""
    for key, table in content["tables"].items():
        yield key, [(plain(name), values) for name, values in table["rows"].items()]
    for key, table in content["ablations"].items():
        # The number of masks is a column of the paper's, and part of our label.
        number = [[float(row["label"].split(", ")[1])] if key == "7" else [] for row in table["rows"]]
        names = [row["label"].split(", ")[0] if key == "7" else row["label"] for row in table["rows"]]
        rows = zip(names, number, table["rows"], strict=True)
        yield key, [(plain(name), [*first, *row["values"]]) for name, first, row in rows]
    yield "unified", [(plain(name), values) for name, values in content["unified"]["rows"].items()]


def read_tables(text: str) -> dict[str, list[Row]]:
    """Label → rows, from all `tabular`s since the label before; rows of one name in two of them are joined."""
    for name, value in re.findall(r"\\def\\(\w+ours)\{([\d.]+)\}", text):
        text = text.replace(f"\\{name}", value)
    found: dict[str, list[Row]] = {}
    parts = re.split(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", text, flags=re.DOTALL)
    waiting: list[list[Row]] = []
    for place, part in enumerate(parts):
        if place % 2:
            waiting.append(list(rows_of(part)))
        elif waiting and (label := re.search(r"\\label\{([\w:.-]*tab:[\w:.-]+)\}", part)):
            found[label[1]] = joined(waiting)
            waiting = []
    return found


def joined(tables: list[list[Row]]) -> list[Row]:
    """The rows of several parts of a table, by their names."""
    if len(tables) == 1:
        return tables[0]
    rows = tables[0]
    for more in tables[1:]:
        rows = [(name, [*values, *dict(more)[name]]) for name, values in rows]
    return rows


def rows_of(tabular: str) -> Iterator[Row]:
    """The rows that end in numbers: the cells before them, joined, and the numbers."""
    for line in tabular.split(r"\\"):
        cells = [plain(cell) for cell in line.split("&")]
        numbers: list[float] = []
        while cells and re.fullmatch(r"[\d.]+", cells[-1]):
            numbers.insert(0, float(cells.pop()))
        name = ",".join(cell for cell in cells if cell)
        if numbers and name:
            yield name, numbers


def plain(cell: str) -> str:
    """A cell without LaTeX, white space and capitals: `\\textbf{42.2}` → `42.2`."""
    cell = re.sub(r"\\(toprule|midrule|bottomrule|hline|times)|\[-?[\d.]+em\]", "", cell)
    cell = re.sub(r"\\(rowcolor|cite|cmidrule\(lr\)|multirow)(\[[^]]*\])?\{[^}]*\}", "", cell)
    cell = re.sub(r"~?\\scalebox\{[^}]*\}(\[[^]]*\])?", "", cell)
    greek = {"alpha": "α", "tau": "τ", "lambda": "λ"}
    cell = re.sub(r"\\(alpha|tau|lambda)", lambda match: greek[match[1]], cell)
    while match := re.search(r"\\(?:textbf|underline|mathrm)\{([^{}]*)\}", cell):
        cell = cell[: match.start()] + match[1] + cell[match.end() :]
    return re.sub(r"[\s{}$!~\\]|%.*", "", cell).lower()


if __name__ == "__main__":
    raise SystemExit(main())
