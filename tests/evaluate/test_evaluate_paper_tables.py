"""Tables: the paper's rows are transcribed right, averages and ranks follow from them, every format shows them."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from powerclip.errors import UserError
from powerclip.evaluate.metrics import GROUPS, KINDS
from powerclip.evaluate.paper_tables import (
    FORMATS,
    Method,
    Metric,
    PaperTable,
    build_tables,
    collect,
    measured_rows,
    published,
    render,
    wins_line,
)


def result(dataset, metrics, task="zeroshot_classification", model="ours"):
    return {"dataset": dataset, "model": model, "pretrained": "", "task": task, "metrics": metrics, "language": "en"}


def wins(table):
    """By the names of the methods, which differ here."""
    return {method.name: count for method, count in zip(table.methods, table.wins(), strict=True)}


def test_printed_averages_are_those_of_the_rows_but_for_the_two_that_the_notes_list():
    wrong = []
    for table in build_tables([]):
        if table.key == "unified":
            continue  # has no averages
        printed = published()[table.key]
        for method in table.methods:
            given = dict(zip([*printed["columns"], *printed["averages"]], printed["rows"][method.name], strict=True))
            for metric in table.metrics:
                if metric.over and abs(method.value(metric) - given[metric.key]) > 0.075:
                    wrong.append((table.key, method.name, metric.key, round(method.value(metric), 2)))
    assert wrong == [("robustness", "CLIP", "ood", 29.92), ("robustness", "A-CLIP", "ood", 29.28)]


def test_the_published_tables_have_the_papers_shape():
    shapes = {
        table.key: (len(table.methods), len([metric for metric in table.metrics if not metric.over]))
        for table in build_tables([])
    }
    assert shapes == {
        "classification": (9, 17),
        "retrieval": (9, 18),
        "robustness": (9, 6),
        "sugarcrepe": (9, 3),
        "winoground": (7, 3),
        "probe": (8, 3),
        "sugarcrepe_kinds": (9, 7),
        "ov_coco": (6, 3),
        "unified": (3, 34),
    }


def test_the_paper_leads_where_the_notes_count_it():
    tables = {table.key: table for table in build_tables([])}
    lead = {key: wins(table) for key, table in tables.items()}
    assert lead["classification"]["PowerCLIP-S"] + lead["classification"]["PowerCLIP-R"] == 12
    assert lead["retrieval"]["PowerCLIP-S"] == 17
    assert lead["retrieval"]["PowerCLIP-R"] == 1
    assert lead["robustness"] == {**dict.fromkeys(lead["robustness"], 0), "C-PGS": 1, "PowerCLIP-S": 5}


def test_a_measured_model_stands_beside_the_published_ones():
    recalls = {f"{side}_retrieval_recall@{k}": 0.9 for side in ("text", "image") for k in (1, 5, 10)}
    records = [
        result("wds/vtab/cifar10", {"acc1": 0.913, "acc5": 0.99}),
        result("wds/voc2007", {"acc1": 0.7}),
        result("voc2007_multilabel", {"mean_average_precision": 0.6}),
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
    ours = {key: table.methods[-1].values for key, table in tables.items()}
    assert ours["classification"] == pytest.approx({"cifar10": 91.3, "voc2007": 70})
    assert ours["sugarcrepe"] == pytest.approx({"obj": 70})  # of Att, only one kind of three was measured
    assert ours["winoground"] == pytest.approx({"text": 30, "image": 20, "group": 10})
    assert ours["probe"] == pytest.approx({"cifar10": 95})
    table = tables["classification"]
    assert table.methods[-1].value(table.metrics[-1]) is None  # no average of what is not all there
    assert wins(table)["ours"] == 2
    assert "| ours |" in render([table], "md")
    assert "**91.3**" in render([table], "md")
    assert "<u>81.3</u>" in render([table], "md")


def test_table_4_is_made_of_table_12_but_for_the_numbers_that_the_notes_list():
    whole, kinds = published()["sugarcrepe"]["rows"], published()["sugarcrepe_kinds"]
    wrong = []
    for name, values in kinds["rows"].items():
        by_kind = dict(zip(kinds["columns"], values, strict=True))
        for printed, (group, own) in zip(whole[name], GROUPS.items(), strict=True):
            if abs(printed - mean(by_kind[kind] for kind in own)) > 0.075:
                wrong.append((name, group))
    assert wrong == [("SPARC", "att"), ("PowerCLIP-R", "rel")]


def test_what_is_in_no_table_of_the_paper_has_a_table_of_its_own():
    recalls = {f"{side}_retrieval_recall@{k}": 0.25 for side in ("text", "image") for k in (1, 5, 10)}
    own = [
        result("birds", {"acc1": 0.5, "acc5": None, "mean_per_class_recall": 0.4}),
        result("photos", recalls, "zeroshot_retrieval"),
        result("boxes", {"pointing_words": 0.3, "pointing_text": 0.2, "pointing_chance": 0.1}, "pointing_game"),
        result("edits/colour", {"acc": 0.6, "image_acc": 1, "text_acc": 0.6}, "image_caption_selection"),
    ]
    (table,) = build_tables(own)
    assert (table.key, len(table.methods)) == ("own", 1)
    labels = [metric.label for metric in table.metrics]
    assert labels[:2] == ["birds", "photos text R@1"]
    assert labels[-3:] == ["boxes in caption", "boxes alone", "edits/colour"]
    assert table.methods[0].values["edits/colour"] == pytest.approx(60)
    assert wins_line([table]).startswith("Wins in 10 columns")
    page = render([table], "html")
    assert '<th class="group" colspan="3">photos text</th>' in page  # names of datasets are not repeated
    assert '<th class="group" colspan="1">edits</th>' in page
    assert ">colour</th>" in page
    assert "†" not in page  # there are no published rows to explain


def test_a_part_of_sugarcrepe_is_not_set_beside_the_whole():
    records = [result(f"sugar_crepe/{kind}", {"acc": 0.5}, "image_caption_selection") for kind in KINDS]
    assert {table.key for table in build_tables(records)} == {"sugarcrepe", "sugarcrepe_kinds"}
    partial = [{**record, "powerclip": {"counts": {"missing": 6994}}} for record in records]
    assert {table.key for table in build_tables(partial)} == {"own"}


def test_models_of_the_same_name_stay_apart_by_their_weights():
    records = [{**result("cifar10", {"acc1": n / 10}), "powerclip": {"weights": f"{n}23456789"}} for n in (4, 5)]
    assert set(measured_rows(records)) == {"ours (423456)", "ours (523456)"}
    assert set(measured_rows(records[:1])) == {"ours"}


def test_of_two_results_of_a_model_none_is_dropped_in_silence():
    records = [result("cifar10", {"acc1": share}) for share in (0.5, 0.5, 0.7)]
    assert measured_rows(records[:2])["ours"]["classification"] == {"cifar10": 50}
    with pytest.raises(UserError, match=r"two results of ours on cifar10 differ, 50\.0 and 70\.0: leave one"):
        measured_rows(records)


def test_a_table_that_another_one_repeats_adds_no_wins():
    everything = build_tables([])
    # Nor does OV-COCO, which is none of the paper's 28 benchmarks.
    assert {table.key for table in everything if not table.counted} == {"sugarcrepe_kinds", "ov_coco", "unified"}
    assert wins_line(everything).startswith("Wins in 50 columns")  # 17 + 18 + 6 + 3 + 3 + 3


def test_neighbours_of_a_group_share_a_header_where_the_format_can():
    tables = build_tables([])
    assert '<th class="group" colspan="3">MS-COCO text</th>' in render(tables, "html")
    page = render(tables, "tex")
    assert r"\multicolumn{3}{c}{MS-COCO text}" in page
    assert r"\cmidrule(lr){2-4}" in page
    assert page.count(r"\resizebox") == 3  # the tables that are wider than a page
    for table in page.split(r"\begin{table*}")[1:]:
        columns = len(table.split(r"\begin{tabular}{")[1].split("}")[0])
        assert {line.count("&") for line in table.splitlines() if line.endswith(r"\\") and "multi" not in line} == {
            columns - 1
        }
    assert "| MS-COCO text R@1 |" in render(tables, "md")


def test_a_tie_is_a_win_for_both():
    metrics = (Metric("a", "A"), Metric("b", "B"))
    table = PaperTable("t", "T", metrics, (Method("x", {"a": 1, "b": 2}), Method("y", {"a": 1})))
    assert wins(table) == {"x": 1, "y": 1}
    assert wins_line([table]) == "Wins in 2 columns: x 1, y 1."


def test_a_measured_model_and_a_published_one_of_the_same_name_keep_their_own_wins():
    both = (Method("CLIP", {"a": 1.0}, published=True), Method("CLIP", {"a": 2.0}))
    table = PaperTable("t", "T", (Metric("a", "A"),), both)
    assert table.wins() == [0, 1]
    assert wins_line([table]) == "Wins in 1 columns: CLIP 1, CLIP† 0."


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
    method = table.methods[0]
    assert method.value(table.metrics[-1]) == pytest.approx(mean(method.values.values()))


def test_metrics_that_are_missing_or_no_numbers_are_dashes():
    records = [
        result("winoground", {"acc": 0.3}, "image_caption_selection"),
        result("cifar10", {}, "linear_probe"),
        result("sugar_crepe/add_obj", {"text_acc": 0.3}, "image_caption_selection"),
        result("pets", {"acc1": float("nan")}),
        result("dtd", {"acc1": "high"}),
    ]
    (table,) = build_tables(records, with_published=False)
    assert [cell.text for cell in table.table().rows[0].cells] == ["–", "–", "30.0", "0"]
    with pytest.raises(UserError, match="none of the results has a metric"):
        build_tables(records[1:])


def test_names_do_not_break_a_format():
    tables = build_tables([result("a|b", {"acc1": 0.5}, model="C:\\x~1^2")])
    assert r"| Method | a\|b | Wins |" in render(tables, "md")
    assert r"C:\textbackslash{}x\textasciitilde{}1\textasciicircum{}2" in render(tables, "tex")


@pytest.mark.parametrize(
    "content",
    [[], result("cifar10", None), {**result("cifar10", {"acc1": 0.5}), "powerclip": None}],
)
def test_a_file_that_holds_no_whole_result_is_named(content, tmp_path):
    (tmp_path / "z.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"z\.json: no result of an evaluation"):
        collect([tmp_path])


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
