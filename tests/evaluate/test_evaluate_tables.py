"""Tables: the paper's rows are transcribed right, averages and ranks follow from them, every format shows them."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from powerclip.errors import UserError
from powerclip.evaluate.table_formats import FORMATS, markdown, render, wins_line
from powerclip.evaluate.tables import Column, Row, Table, build_tables, collect, published, rank


def result(dataset, metrics, task="zeroshot_classification", model="ours"):
    return {"dataset": dataset, "model": model, "pretrained": "", "task": task, "metrics": metrics, "language": "en"}


def test_printed_averages_are_those_of_the_rows_but_for_the_two_that_the_notes_list():
    wrong = []
    for table in build_tables([]):
        printed = published()[table.key]
        for row in table.rows:
            given = dict(zip([*printed["columns"], *printed["averages"]], printed["rows"][row.name], strict=True))
            for column in table.columns:
                if column.over and abs(table.value(row, column) - given[column.key]) > 0.075:
                    wrong.append((table.key, row.name, column.key, round(table.value(row, column), 2)))
    assert wrong == [("robustness", "CLIP", "ood", 29.92), ("robustness", "A-CLIP", "ood", 29.28)]


def test_the_published_tables_have_the_papers_shape():
    shapes = {table.key: (len(table.rows), len([c for c in table.columns if not c.over])) for table in build_tables([])}
    assert shapes == {
        "classification": (9, 17),
        "retrieval": (9, 18),
        "robustness": (9, 6),
        "sugarcrepe": (9, 3),
        "winoground": (7, 3),
        "probe": (8, 3),
    }


def test_the_paper_leads_where_the_notes_count_it():
    tables = {table.key: table for table in build_tables([])}
    lead = {key: table.wins() for key, table in tables.items()}
    assert lead["classification"]["PowerCLIP-S"] + lead["classification"]["PowerCLIP-R"] == 12
    assert lead["retrieval"]["PowerCLIP-S"] == 17
    assert lead["retrieval"]["PowerCLIP-R"] == 1
    assert lead["robustness"] == {**dict.fromkeys(lead["robustness"], 0), "C-PGS": 1, "PowerCLIP-S": 5}


def test_a_measured_model_stands_beside_the_published_ones():
    recalls = {f"{side}_retrieval_recall@{k}": 0.9 for side in ("text", "image") for k in (1, 5, 10)}
    records = [
        result("wds/vtab/cifar10", {"acc1": 0.913, "acc5": 0.99}),
        result("voc2007_multilabel", {"mean_average_precision": 0.7}),
        result("flickr8k", recalls, "zeroshot_retrieval"),
        result("imagenet-a", {"acc1": 0.05}),
        result("winoground", {"text_acc": 0.3, "image_acc": 0.2, "acc": 0.1}, "image_caption_selection"),
        result("cifar10", {"lp_acc1": 0.95}, "linear_probe"),
        *(
            result(f"sugar_crepe/{kind}", {"acc": value}, "image_caption_selection")
            for kind, value in (("replace_obj", 0.8), ("swap_obj", 0.6), ("add_obj", 0.7), ("replace_att", 0.9))
        ),
    ]
    tables = {table.key: table for table in build_tables(records)}
    ours = {key: table.rows[-1].values for key, table in tables.items()}
    assert ours["classification"] == pytest.approx({"cifar10": 91.3, "voc2007_multilabel": 70})
    assert ours["sugarcrepe"] == pytest.approx({"obj": 70})  # of Att, only one kind of three was measured
    assert ours["winoground"] == pytest.approx({"text": 30, "image": 20, "group": 10})
    assert ours["probe"] == pytest.approx({"cifar10": 95})
    table = tables["classification"]
    assert table.value(table.rows[-1], table.columns[-1]) is None  # no average of what is not all there
    assert table.wins()["ours"] == 2
    assert "| ours |" in markdown([table])
    assert "**91.3**" in markdown([table])
    assert "<u>81.3</u>" in markdown([table])


def test_ranks_go_by_what_is_shown_and_ties_share_them():
    assert rank([70.34, 70.26, None, 71.0, 60.0]) == ["second", "second", "", "best", ""]
    assert rank([5.0]) == [""]


def test_a_tie_is_a_win_for_both():
    table = Table("t", "T", (Column("a", "A"), Column("b", "B")), (Row("x", {"a": 1, "b": 2}), Row("y", {"a": 1})))
    assert table.wins() == {"x": 1, "y": 1}
    assert wins_line([table]) == "Wins in 2 columns: x 1, y 1."


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_format_shows_every_published_value(form):
    page = render(build_tables([]), form)
    for table in published().values():
        for name, values in table["rows"].items():
            assert name in page
            assert all(f"{value:.1f}" in page for value in values[: len(table["columns"])])
    assert "published" in page


def test_averages_of_all_rows_are_computed_not_copied():
    (table,) = [table for table in build_tables([]) if table.key == "classification"]
    row = table.rows[0]
    assert table.value(row, table.columns[-1]) == pytest.approx(mean(row.values.values()))


def test_results_are_collected_from_folders_and_strangers_are_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.json").write_text(json.dumps(result("cifar10", {"acc1": 0.5})))
    (tmp_path / "y.json").write_text(json.dumps([result("pets", {"acc1": 0.5})]))
    assert [one["dataset"] for one in collect([tmp_path])] == ["cifar10", "pets"]
    (tmp_path / "z.json").write_text('{"loss": 3}')
    with pytest.raises(UserError, match=r"z\.json: no result of an evaluation"):
        collect([tmp_path])
    with pytest.raises(UserError, match="there is no file or folder"):
        collect([tmp_path / "gone"])
    with pytest.raises(UserError, match="there is no format 'pdf'"):
        render([], "pdf")
