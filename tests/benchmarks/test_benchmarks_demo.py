"""The benchmark of the live page starts a server, asks it from several clients and writes what it promises."""

import json

import pytest

pytest.importorskip("uvicorn", reason="the page needs the extra demo")
pytest.importorskip("httpx", reason="the clients need httpx")

import demo


def test_it_counts_answers_and_measures_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demo.py", "--tiny", "--keys", "0", "--output", str(tmp_path)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    demo.main()
    (result,) = tmp_path.glob("*-demo-cpu.json")
    crowd = json.loads(result.read_text())["crowd"]
    assert crowd["clients"] == 2
    assert crowd["answers"] > 0
    assert crowd["errors"] == 0
    assert crowd["MiB at the end"] > 0
