"""The cost study: every way over M and every method is measured, and results of others can be drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from powerclip import cli
from powerclip.analysis import cost
from powerclip.analysis.cost import WAYS, Size, analyse, lines, measure_cost, read_cost
from powerclip.analysis.cost_figure import cost_figure
from powerclip.analysis.measure import PeakOfTensors, measure
from powerclip.errors import UserError
from powerclip.objectives import OBJECTIVES
from powerclip.train.recipe import ModelSection

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def size():
    return Size(ModelSection(config=TINY), 12, (2, 4, 11), repeats=1, rounds=1)


@pytest.fixture(scope="module")
def measured(size):
    return measure_cost(size, CPU)


def test_every_way_is_measured_at_every_number_of_regions_and_every_method_beside_clip(measured):
    found = {(row["way"], row["M"]): row for row in measured["steps"]}
    assert set(found) == {("CLIP", None), *((way, count) for way in WAYS for count in (2, 4, 11))}
    assert all(row["ms"] > 0 and row["gib"] > 0 for row in found.values())
    methods = {row["method"]: row for row in measured["methods"]}
    assert tuple(methods) == OBJECTIVES
    assert methods["clip"]["relative"] == 1
    assert methods["powerclip"]["paper"] == 1.72
    assert methods["flip"]["paper"] is None


def test_the_memory_of_the_exact_loss_grows_with_the_sets_and_that_of_the_approximation_does_not(measured):
    gib = {(row["way"], row["M"]): row["gib"] for row in measured["steps"]}
    assert gib["exact, all pairs", 11] > 2 * gib["exact, all pairs", 4]
    assert gib["NLA, all pairs", 11] < 1.2 * gib["NLA, all pairs", 2]


def test_what_is_too_large_for_a_cpu_is_left_out_and_said_so(size, monkeypatch):
    monkeypatch.setattr(cost, "MOST", 2**12)
    monkeypatch.setattr(cost, "OBJECTIVES", ("clip",))
    rows = {(row["way"], row["M"]): row for row in measure_cost(size, CPU)["steps"]}
    assert rows["exact, chosen pairs", 11]["note"] == "too large"
    assert rows["exact, chosen pairs", 11]["ms"] is None
    assert rows["NLA, chosen pairs", 11]["ms"] > 0


def test_out_of_memory_is_a_result_and_not_the_end(size, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    said = []
    monkeypatch.setattr(cost, "measure", full)
    monkeypatch.setattr(cost, "WAYS", {"exact, all pairs": WAYS["exact, all pairs"]})
    monkeypatch.setattr(cost, "OBJECTIVES", ("clip",))
    rows = measure_cost(size, CPU, said.append)["steps"]
    assert {row["note"] for row in rows} == {"out of memory"}
    assert said[0].endswith("out of memory")


def test_the_study_writes_numbers_and_a_figure_that_can_be_drawn_again(measured, size, monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "measure_cost", lambda *_: measured)
    found = analyse(tmp_path / "one", size=size, device="cpu")
    assert (tmp_path / "one" / "cost.png").stat().st_size > 1000
    again = analyse(tmp_path / "two", [tmp_path / "one" / "cost.json"])
    assert again == found
    assert (tmp_path / "two" / "cost.png").read_bytes() == (tmp_path / "one" / "cost.png").read_bytes()
    text = "\n".join(lines(found))
    assert "exact, chosen pairs" in text
    assert "paper 1.72" in text


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
    assert len(cost_figure(cost.merge(found)).axes) == 4


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


def test_the_command_shows_examples():
    shown = CliRunner().invoke(cli.app, ["analyse", "cost", "--help"]).stdout
    (example,) = re.findall(r"powerclip analyse cost --from (\S+)", shown)
    assert lines(read_cost(Path(__file__).parents[2] / example))


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
