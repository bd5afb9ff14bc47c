"""The cost of a step: every variant over M and every method is measured, and results of others can be drawn."""

from __future__ import annotations

import json
import re

import cost
import pytest
import torch
from cost import TINY, VARIANTS, measure_cost
from cost_plot import cost_figure, merge, read_cost, tables
from measure import PeakOfTensors, measure
from typer.testing import CliRunner

from powerclip import cli
from powerclip.errors import UserError
from powerclip.objectives import OBJECTIVES

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured():
    return measure_cost(TINY, CPU)


def test_every_variant_is_measured_at_every_number_of_regions_and_every_method_beside_clip(measured):
    found = {(row["variant"], row["M"]): row for row in measured["steps"]}
    assert set(found) == {("CLIP", None), *((variant, count) for variant in VARIANTS for count in (2, 4, 11))}
    assert all(row["ms"] > 0 and row["gib"] > 0 for row in found.values())
    methods = {row["method"]: row for row in measured["methods"]}
    assert tuple(methods) == OBJECTIVES
    assert methods["clip"]["relative"] == 1
    assert methods["powerclip"]["paper"] == 1.72
    assert methods["flip"]["paper"] is None


def test_the_memory_of_the_exact_loss_grows_with_the_sets_and_that_of_the_approximation_does_not(measured):
    gib = {(row["variant"], row["M"]): row["gib"] for row in measured["steps"]}
    assert gib["exact, all pairs", 11] > 2 * gib["exact, all pairs", 4]
    assert gib["NLA, all pairs", 11] < 1.2 * gib["NLA, all pairs", 2]


def test_what_is_too_large_for_a_cpu_is_left_out_and_said_so(monkeypatch):
    monkeypatch.setattr(cost, "MOST_ENUMERATED", 2**12)
    monkeypatch.setattr(cost, "OBJECTIVES", ("clip",))
    rows = {(row["variant"], row["M"]): row for row in measure_cost(TINY, CPU)["steps"]}
    assert rows["exact, chosen pairs", 11]["note"] == "too large"
    assert rows["exact, chosen pairs", 11]["ms"] is None
    assert rows["NLA, chosen pairs", 11]["ms"] > 0


def test_out_of_memory_is_a_result_and_not_the_end(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    reported = []
    monkeypatch.setattr(cost, "measure", full)
    monkeypatch.setattr(cost, "VARIANTS", {"exact, all pairs": VARIANTS["exact, all pairs"]})
    monkeypatch.setattr(cost, "OBJECTIVES", ("clip",))
    rows = measure_cost(TINY, CPU, reported.append)["steps"]
    assert {row["note"] for row in rows} == {"out of memory"}
    assert reported[0].endswith("out of memory")


def test_it_writes_numbers_and_a_figure_that_can_be_drawn_again(measured, monkeypatch, tmp_path, capsys):
    def run(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["cost.py", "--device", "cpu", "--output", str(tmp_path), *options])
        cost.main()
        return capsys.readouterr().out

    monkeypatch.setattr(cost, "measure_cost", lambda *_: measured)
    printed = run("--tiny")
    (result,) = tmp_path.glob("*-cost-tiny.json")
    assert result.with_suffix(".png").stat().st_size > 1000
    assert "| exact, chosen pairs |" in result.with_suffix(".md").read_text()
    again = run("--from", str(result))
    assert (tmp_path / "cost.png").read_bytes() == result.with_suffix(".png").read_bytes()
    assert again.splitlines()[:-1] == printed.splitlines()[:-1]
    powerclip = next(line for line in again.splitlines() if line.startswith("| powerclip |"))
    assert powerclip.endswith(" 1.72 |")


def test_results_of_the_benchmarks_are_recognised_by_what_they_hold(tmp_path):
    origin = {"machine": "a GPU"}
    row = {"sweep": "M", "what": "nla", "backend": "torch", "dtype": "float32", "ms": 2.0, "gib": None}
    size = {"images": 8, "captions": 9, "regions": 4}
    scoring = {"origin": origin, "rows": [{**row, "size": size}, {**row, "ms": None, "size": size}]}
    steps = {"origin": origin, "rows": [{"name": "our CLIP", "ms": 10.0}, {"name": "PowerCLIP", "ms": 12.0}]}
    method = {"method": "flip", "relative": 0.5, "smallest": 0.4, "largest": 0.6}
    methods = {"origin": origin, "about": "ViT-B/16", "rows": [method]}
    found = []
    for name, content in (("alignment", scoring), ("step", steps), ("methods", methods)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        found.append(read_cost(tmp_path / f"{name}.json"))
    assert found[0].curves[0].lines == {"nla, torch": [(4, 2.0, None)]}
    assert [bar.relative for bar in found[1].bars[0].bars] == [1.0, 1.2]
    assert found[2].bars[0].bars[0].largest == 0.6
    assert len(cost_figure(merge(found)).axes) == 4


ON = '"origin": {"machine": "x"}, "about": "y"'


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"rows": []}',
        '{"origin": {}, "rows": [{"name": "x"}]}',
        f'{{{ON}, "rows": [{{"name": "x", "ms": 0}}]}}',
        f'{{{ON}, "rows": [{{"name": "x", "ms": null}}]}}',
        f'{{{ON}, "rows": [{{"method": "clip", "relative": null, "smallest": 1, "largest": 1}}]}}',
        '{"steps": [], "methods": [], "pairs": 1, "nodes": 1, "machine": "x"}',
        '{"steps": [{"way": "a", "M": 1, "ms": "b", "gib": 1}], "methods": [], "pairs": 1, "nodes": 1, "machine": "x"}',
    ],
)
def test_a_file_that_holds_no_cost_is_one_clear_line(content, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"a\.json: n"):
        read_cost(path)
    with pytest.raises(UserError, match="there is no file"):
        read_cost(tmp_path / "gone.json")


def test_the_result_in_the_help_can_be_drawn():
    (example,) = re.findall(r"--from (\S+\.json)", str(cost.__doc__))
    assert tables(read_cost(cost.RESULTS.parents[1] / example))


def test_the_old_command_says_what_replaced_it(capsys):
    with pytest.raises(UserError, match=r"python benchmarks/cost\.py"):
        CliRunner().invoke(cli.app, ["analyse", "cost", "--from", "x.json"], catch_exceptions=False)


def test_the_peak_is_that_of_the_tensors_that_live_at_the_same_time():
    block = torch.ones(1000)  # made before: not counted
    with PeakOfTensors() as counted:
        one = block + 1
        two = one + 1
        view = two[:10].add_(1)
        del one
        three = two * 2
    assert counted.peak == 2 * 4000
    del two, three, view
    assert counted.live == 0


def test_a_gradient_keeps_what_it_needs_alive():
    x = torch.ones(1000, requires_grad=True)

    def run(track: bool) -> float:
        def function():
            with torch.set_grad_enabled(track):
                y = x
                for _ in range(8):
                    y = y.exp()

        return measure(function, CPU, repeats=1, warmup=0, count_tensors=True).gib * 2**30

    assert run(track=False) == 2 * 4000
    assert run(track=True) == 8 * 4000
