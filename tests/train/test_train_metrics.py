"""Where metrics go: each row once, in a file, in tensorboard and, when asked for, in Weights & Biases."""

from __future__ import annotations

import signal
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from tiny_run import tiny

from powerclip.errors import UserError
from powerclip.runtime.signals import Preempted
from powerclip.train.loop import train
from powerclip.train.metrics import MetricsLog, read_metrics


def test_rows_after_the_step_that_a_run_continues_from_are_written_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, tmp_path / "tb", after=0)
    for step in (1, 2, 3):
        log.write(step, {"loss": 10.0 + step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    log = MetricsLog(path, tmp_path / "tb", after=2)
    log.write(3, {"loss": 0.5})
    log.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 11.0), (2, 12.0), (3, 0.5)]


def test_a_new_run_begins_with_an_empty_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsLog(path, tmp_path / "tb", after=0).close()
    assert list(read_metrics(path)) == []


@pytest.mark.parametrize("damage", [b'{"step": 2, "lo', b"\xff\x80\n", b"5\n", b'{"loss": 1.0}\n'])
def test_rows_are_read_up_to_the_first_that_is_damaged(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + damage)
    assert list(read_metrics(path)) == [{"step": 1, "loss": 2.0}]


# ---- Weights & Biases ------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self, **options):
        self.options, self.rows, self.finished = options, [], False

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs that a module in place of wandb was asked to make."""
    runs: list[FakeRun] = []

    def init(**options):
        runs.append(FakeRun(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=ModuleSpec("wandb", None)))
    return runs


def test_every_row_goes_to_the_project_and_a_resumed_run_keeps_its_identity(tmp_path, wandb):
    def stop(state):
        if state.step == 6:
            signal.raise_signal(signal.SIGTERM)

    recipe = tiny(tmp_path, "train.wandb=trees")
    with pytest.raises(Preempted):
        train(recipe, tmp_path / "run", quiet=True, on_step=stop)
    train(recipe, tmp_path / "run", quiet=True, resume=True)
    first, second = wandb
    assert first.options["project"] == "trees"
    assert first.options["name"] == "run"
    assert first.options["config"]["optim"]["lr"] == 1e-3
    assert first.options["id"] == second.options["id"]
    assert [step for step, _ in first.rows] == [1, 2, 4, 6]
    assert [step for step, _ in second.rows] == [8, 10, 12]
    assert "loss" in second.rows[-1][1]
    assert first.finished
    assert second.finished
    train(recipe, tmp_path / "run", quiet=True, overwrite=True)
    assert wandb[2].options["id"] != first.options["id"]


def test_a_recipe_that_asks_for_it_without_the_package_fails_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"train\.wandb: .* not installed; pip install 'powerclip\[wandb\]'"):
        train(tiny(tmp_path, "train.wandb=trees"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
