"""Where a run was made is written beside it, once for each start."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
from pathlib import Path

import pytest
from tiny_run import tiny

import powerclip
from powerclip.runtime.environment import environment, note_environment, revision
from powerclip.runtime.signals import Preempted
from powerclip.train.loop import train


def test_versions_and_the_revision_of_the_code_are_told(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    found = environment()
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["powerclip"] == powerclip.__version__
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert "secret" not in json.dumps(found)
    root = Path(powerclip.__file__).parents[1]
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        assert revision().removesuffix("-dirty") == head


def test_each_start_of_a_run_adds_an_entry(tmp_path):
    def stop(state):
        if state.step == 6:
            signal.raise_signal(signal.SIGTERM)

    recipe = tiny(tmp_path)
    with pytest.raises(Preempted):
        train(recipe, tmp_path / "run", quiet=True, on_step=stop)
    train(recipe, tmp_path / "run", quiet=True, resume=True)
    entries = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [entry["after_step"] for entry in entries] == [0, 7]
    train(recipe, tmp_path / "run", quiet=True, overwrite=True)
    assert len(json.loads((tmp_path / "run" / "environment.json").read_text())) == 1


@pytest.mark.parametrize("content", ["[{", "{}"])
def test_a_damaged_file_does_not_keep_a_run_from_starting(tmp_path, content):
    path = tmp_path / "environment.json"
    path.write_text(content)
    note_environment(path, 3)
    assert [entry["after_step"] for entry in json.loads(path.read_text())] == [3]
