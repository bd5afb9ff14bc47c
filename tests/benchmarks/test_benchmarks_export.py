"""The benchmark of exports runs on tiny towers, and writes what it promises."""

import json
import sys

import export


def test_an_export_is_measured_beside_torch(tmp_path, monkeypatch, capsys):
    # Torch programs are traced fastest; tests/export has the other forms.
    arguments = ["export.py", "--tiny", "--forms", "pt2", "--threads", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    export.main()
    content = json.loads(next(tmp_path.glob("*-export-cpu.json")).read_text())
    rows = {(row["form"], row["precision"]): row for row in content["rows"]}
    assert rows.keys() == {("torch", "fp32"), ("pt2", "fp32"), ("pt2", "fp16")}
    assert rows["pt2", "fp32"]["difference"] < 1e-5
    assert rows["pt2", "fp16"]["mb"] < 0.6 * rows["pt2", "fp32"]["mb"]
    assert rows["torch", "fp32"]["image_ms"] > 0
    assert {"onnxruntime", "commit", "machine"} <= content["origin"].keys()
    assert "| pt2 fp16 |" in capsys.readouterr().out
