"""The notebooks run from the first cell to the last, and are kept as they ran: with their picture, and small."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from powerclip.encoders import build, save

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
TOWERS = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 1},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def outputs(notebook: dict) -> list[dict]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_cpu(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    torch.manual_seed(0)
    save(build(config=TOWERS), tmp_path / "model")
    monkeypatch.setenv("POWERCLIP_NOTEBOOK_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_one_picture_and_without_traces_of_a_machine(path):
    content = path.read_text(encoding="utf-8")
    kept = outputs(json.loads(content))
    assert sum("image/png" in output.get("data", {}) for output in kept) == 1
    assert not any(output.get("name") == "stderr" or output["output_type"] == "error" for output in kept)
    assert len(content) < 200_000
    assert os.path.expanduser("~") + "/" not in content
