"""The runs of a study: seeds are shared, finished runs are kept, failures do not stop the rest."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny_study import STUDY

from powerclip.compare import pool
from powerclip.compare.run import RunOptions, compare_study
from powerclip.compare.study import Study, StudyResults, read_study
from powerclip.errors import UserError
from powerclip.train.results import Results


def run(study: Study, output: Path, seeds: list[int], **options: bool) -> tuple[StudyResults, str]:
    printed = io.StringIO()
    results = compare_study(study, output, seeds, RunOptions(console=Console(file=printed, width=80), **options))
    return results, printed.getvalue()


def test_a_study_writes_its_table_and_goes_on_where_it_stopped(folder, monkeypatch):
    study, output = read_study([str(folder / "study.yaml")]), folder / "out"
    results, printed = run(study, output, [0, 1])
    assert all(isinstance(results[name][seed], Results) for name in ("clip", "powerclip", "heavy") for seed in (0, 1))
    assert "[6/6] heavy, seed 1: retrieval" in printed
    assert printed.count("12 images") == 1  # the corpus was read once
    table = (output / "table.md").read_text()
    assert table.startswith("A trial.\n\n| setting | retrieval | Δ | R@1 | Δ | R@1 text |")
    assert "| heavy |" in table
    assert "- clip: the baseline" in table
    assert "2 seeds (0, 1)" in table
    written = json.loads((output / "results.json").read_text())
    assert written["baseline"] == "clip"
    assert written["settings"]["heavy"]["runs"]["1"]["scores"] == results["heavy"][1].scores
    assert written["settings"]["heavy"]["summary"]["composition/acc"]["seeds"] == 2
    page = (output / "curves.html").read_text()
    assert all(f"■ {name}" in page for name in results)
    assert page.count("<svg") == 5  # losses, violation, empty sets, scale
    assert not (output / "clip" / "seed-0" / "model").exists()

    trained = []
    original = pool.train
    monkeypatch.setattr(pool, "train", lambda *args, **kwargs: trained.append(args) or original(*args, **kwargs))
    again, printed = run(study, output, [0, 1])
    assert again == results
    assert trained == []
    assert printed.count("finished before") == 6
    run(read_study([str(folder / "study.yaml")], ["alignment.weight=2"]).only(["heavy"]), output, [1])
    assert [args[1].parts[-2:] for args in trained] == [("clip", "seed-1"), ("heavy", "seed-1")]


def test_results_of_another_version_do_not_count_and_a_line_says_so(folder, monkeypatch):
    study, output = read_study([str(folder / "study.yaml")]).only(["clip"]), folder / "out"
    run(study, output, [0, 1])
    path = output / "clip" / "seed-1" / "results.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "format"}))
    _, printed = run(study, output, [0, 1])
    assert printed.count("finished by another version, with other metrics: it is trained again") == 1
    assert printed.count("finished before") == 1
    assert json.loads(path.read_text())["format"] == 2


def test_all_settings_of_a_seed_start_from_the_same_weights_and_see_the_same_pairs(folder):
    # A weight of zero is CLIP: the same data, weights and order give the same first loss, to the bit.
    (folder / "study.yaml").write_text(
        "base: base.yaml\nsettings: {clip: {objective: clip}, zero: {alignment: {weight: 0.0}}}"
    )
    results, _ = run(read_study([str(folder / "study.yaml")]), folder / "out", [0, 1])
    for seed in (0, 1):
        one, other = (
            json.loads((folder / "out" / name / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()[0])
            for name in ("clip", "zero")
        )
        assert one["clip"] == other["clip"]
    assert results["clip"][0].scores != results["clip"][1].scores


def test_a_change_of_the_evaluation_alone_runs_again(folder):
    study, output = read_study([str(folder / "study.yaml")]).only(["clip"]), folder / "out"
    run(study, output, [0])
    without = read_study([str(folder / "study.yaml")], ["evaluation.composition=null"]).only(["clip"])
    results, printed = run(without, output, [0])
    assert "finished before" not in printed
    assert "composition/acc" not in results["clip"][0].scores


def test_models_are_kept_when_asked_for(folder):
    study = read_study([str(folder / "study.yaml")]).only(["clip"])
    run(study, folder / "out", [0], keep_models=True)
    assert (folder / "out" / "clip" / "seed-0" / "model").is_dir()


def test_a_run_that_fails_is_noted_and_the_rest_goes_on(folder):
    (folder / "study.yaml").write_text(
        "base: base.yaml\nsettings:\n  clip: {objective: clip}\n"
        "  wild: {optim: {weight_decay: 1e36}, train: {max_skipped: 0}}\n  powerclip: {}"
    )
    results, printed = run(read_study([str(folder / "study.yaml")]), folder / "out", [0])
    assert "training diverged" in results["wild"][0].reason
    assert isinstance(results["powerclip"][0], Results)
    assert "wild, seed 0: failed: training diverged" in printed
    table = (folder / "out" / "table.md").read_text()
    assert "- wild, seed 0, failed: training diverged" in table
    assert "| wild | – |" in table


def test_a_backend_that_cannot_run_here_fails_its_setting_alone_and_leaves_no_run(folder, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (folder / "study.yaml").write_text(STUDY + "  fused: {alignment: {backend: triton}}\n")
    results, printed = run(read_study([str(folder / "study.yaml")]).only(["fused"]), folder / "out", [0])
    assert isinstance(results["clip"][0], Results)
    assert "fused, seed 0: failed: alignment.backend: triton" in printed
    assert not (folder / "out" / "fused").exists()


def test_when_every_run_fails_the_study_fails(folder):
    study = read_study([str(folder / "study.yaml")], ["data.shards=nowhere/*.tar"])
    with pytest.raises(UserError, match=r"every run failed; the first: data\.shards: nothing matches"):
        run(study, folder / "out", [0])


def test_nothing_but_the_table_is_printed_when_quiet(folder):
    _, printed = run(read_study([str(folder / "study.yaml")]), folder / "out", [0], quiet=True)
    assert len(printed.splitlines()) == 4  # the header and three settings, however narrow the terminal
