"""The paper's ablations beside studies, Table 11 beside the tables that it repeats, and Figure 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from powerclip import cli
from powerclip.compare.study import read_study
from powerclip.errors import UserError
from powerclip.evaluate.paper_studies import ablation_tables, read_measured, unified
from powerclip.evaluate.paper_tables import build_tables, draw_radar, published
from powerclip.report.radar import radar_figure
from powerclip.runtime.shipped import shipped_yaml

ROOT = Path(__file__).resolve().parents[2]


def study_file(path: Path, settings: dict[str, float], baseline: str = "clip") -> Path:
    """A study's results as `powerclip compare` writes them."""
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "about": "", "baseline": baseline, "seeds": [0, 1], "machine": "none",
        "settings": {
            name: {
                "about": "",
                "summary": {"retrieval/mean_recall": {"mean": value, "std": 0.25}},
                "runs": {"0": {"seconds_per_step": value}, "1": {"error": "stopped"}},
            }
            for name, value in settings.items()
        },
    }  # fmt: skip
    (path / "results.json").write_text(json.dumps(content))
    return path


def command(arguments: list[str]) -> int:
    """The command's exit code."""
    before = sys.argv
    sys.argv = ["powerclip", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def column(table, label):
    """Row label → what the column shows."""
    number = [column.label for column in table.columns].index(label)
    return {row.label: row.cells[number].text for row in table.rows}


def test_the_best_before_powerclip_is_the_best_row_of_each_table():
    columns, rows = unified()
    tables = published()
    assert len(columns) == 34
    for number, (table, key) in enumerate(columns):
        place = tables[table]["columns"].index(key)
        each = {name: values[place] for name, values in tables[table]["rows"].items()}
        assert rows["PowerCLIP-R"][number] == each.pop("PowerCLIP-R"), key
        assert rows["PowerCLIP-S"][number] == each.pop("PowerCLIP-S"), key
        assert rows["PreviousSOTA"][number] == max(each.values()), key


def test_every_setting_that_fills_a_row_is_one_of_a_study():
    named = set()
    for name in shipped_yaml("studies"):
        named |= {setting.name for setting in read_study([name]).settings}
    tables = json.loads((ROOT / "powerclip/evaluate/published.json").read_text())["ablations"]
    for table in tables.values():
        for row in table["rows"]:
            for several in (row.get("settings", []), row.get("printed", [])):
                assert not several or named & set(several), (table["title"], row["label"])
                assert set(several) <= named, set(several) - named


def test_a_study_stands_beside_the_published_numbers(tmp_path):
    folder = study_file(
        tmp_path / "mine", {"w.o. alignment": 9.0, "whole": 10.5, "w.o. R2T": 11.0, "printed": 7.0}, "w.o. alignment"
    )
    (table,) = ablation_tables([read_measured(folder)])
    assert table.title.startswith("Table 6.")
    assert column(table, "Cls†")["PowerCLIP-S"] == "42.2"
    assert column(table, "mine: recall") == {
        "PowerCLIP-S": "10.5 ± 0.3", "w/o region sets": "–", "w/o parse trees": "–", "w/o R2T agg.": "11.0 ± 0.3",
        "w/o T2R agg.": "–", "w/o Triplet loss": "9.0 ± 0.3",
    }  # fmt: skip
    assert column(table, "mine, printed loss: recall")["PowerCLIP-S"] == "7.0 ± 0.3"
    table.print(Console(quiet=True))
    assert "mine: recall" in table.markdown()
    (bare,) = ablation_tables([read_measured(folder)], with_published=False)
    assert "Cls†" not in [column.label for column in bare.columns]


def test_times_come_from_a_study_of_methods_or_from_the_benchmark(tmp_path):
    methods = read_measured(study_file(tmp_path / "methods", {"clip": 2.0, "sparc": 3.0, "powerclip": 2.5}))
    recorded = ROOT / "benchmarks" / "results" / "2026-11-15-methods-cuda.json"
    (table,) = [table for table in ablation_tables([methods, read_measured(recorded)]) if "13" in table.title]
    assert column(table, "methods: × CLIP") == {"CLIP": "1.00", "SPARC": "1.50", "FILIP": "–", "PowerCLIP": "1.25"}
    assert column(table, "2026-11-15-methods-cuda: × CLIP")["FILIP"] == "1.10"
    assert column(table, "Seconds†")["PowerCLIP"] == "2366"


def test_all_recorded_studies_can_be_read():
    results = ROOT / "benchmarks" / "results"
    studies = [read_measured(path) for path in results.glob("*h200-captions10k-table*.json")]
    titles = {table.title.split(".")[0] for table in ablation_tables(studies)}
    assert titles == {"Table 6", "Table 7", "Table 8", "Table 10", "Table 14"}


def test_the_command_sorts_by_the_papers_numbers(tmp_path, capsys):
    folder = study_file(tmp_path / "mine", {"clip": 9.0, "relu, tanh": 10.5, "gelu, tanh": 11.0})
    record = {"dataset": "cifar10", "model": "m", "task": "linear_probe", "metrics": {"lp_acc1": 0.5}}
    (tmp_path / "probe.json").write_text(json.dumps(record))
    assert command(["tables", str(folder), str(tmp_path / "probe.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.index("### Table 8.") < printed.index("### Table 9.")
    assert "Table 1." not in printed
    for form in ("tex", "html"):
        assert command(["tables", str(folder), "-o", str(tmp_path / f"t.{form}")]) == 0
        assert "mine" in (tmp_path / f"t.{form}").read_text()


def test_a_study_of_something_else_is_said_to_be_that(tmp_path, capsys):
    folder = study_file(tmp_path / "other", {"clip": 9.0, "rate 1": 10.0})
    assert command(["tables", str(folder)]) == 2
    assert "none of its settings is one of the paper's Tables" in capsys.readouterr().err
    (folder / "results.json").write_text('{"settings": {"a": 1}, "baseline": "a"}')
    assert command(["tables", str(folder)]) == 2
    assert "not the results of a study" in capsys.readouterr().err


def test_without_results_all_published_tables_are_shown(capsys):
    assert command(["tables"]) == 0
    printed = capsys.readouterr().out
    numbers = [int(line.split()[2].rstrip(".")) for line in printed.splitlines() if line.startswith("### Table ")]
    assert numbers == list(range(1, 16))


def test_a_radar_has_the_axes_that_were_measured(tmp_path):
    figure = radar_figure(["a", "b", "c"], {"one": [1.0, 2.0, None], "two": [2.0, 1.0, 3.0]})
    (plot,) = figure.axes
    one, two = (line.get_ydata() for line in plot.lines)
    assert list(one[:2]) == [0.5, 1.0]
    assert one[2] != one[2]  # a gap
    assert list(two) == [1.0, 0.5, 1.0, 1.0]
    assert {text.get_text() for text in plot.texts} == {"a 2.0", "b 2.0", "c 3.0"}
    records = [
        {"dataset": name, "model": "ours", "task": "zeroshot_classification", "metrics": {"acc1": 0.5}}
        for name in ("cifar10", "cifar100", "imagenet-a")
    ]
    draw_radar(records, True, tmp_path / "radar.svg")
    drawn = (tmp_path / "radar.svg").read_text()
    assert drawn.startswith("<?xml")
    with pytest.raises(UserError, match="2 of the paper's benchmarks were measured"):
        draw_radar(records[:2], True, tmp_path / "radar.png")
    with pytest.raises(UserError, match="no format 'gif'"):
        draw_radar(records, True, tmp_path / "radar.gif")
    assert "unified" in [table.key for table in build_tables(records)]
    assert "unified" not in [table.key for table in build_tables(records[:2])]
