"""The benchmark of exports runs on tiny towers, and writes what it promises."""

import json
import sys

import export
import pytest

pytest.importorskip("onnxruntime")


def test_every_precision_of_onnx_is_measured_beside_torch(tmp_path, monkeypatch, capsys):
    arguments = ["export.py", "--tiny", "--forms", "onnx", "--threads", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    export.main()
    content = json.loads(next(tmp_path.glob("*-export-cpu.json")).read_text())
    rows = {(row["form"], row["precision"]): row for row in content["rows"]}
    assert rows.keys() == {("torch", "fp32"), ("onnx", "fp32"), ("onnx", "fp16"), ("onnx", "int8")}
    assert rows["onnx", "fp32"]["difference"] < 1e-5
    assert rows["onnx", "int8"]["mb"] < 0.5 * rows["onnx", "fp32"]["mb"]
    assert {"onnxruntime", "commit", "machine"} <= content["origin"].keys()
    assert "| onnx int8 |" in capsys.readouterr().out
