"""Checkpoints in the background: what was handed over is what is written, and a failure is neither lost nor final."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch

from powerclip.errors import UserError
from powerclip.train import checkpoint
from powerclip.train.checkpoint_writer import MOST_FAILURES, CheckpointWriter, to_host


@pytest.fixture
def go(monkeypatch) -> threading.Event:
    """Until it is set, no checkpoint is written."""
    go = threading.Event()
    write = checkpoint.write

    def slow(*arguments: object) -> Path:
        go.wait(10)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slow)
    return go


def test_what_happens_to_a_tensor_later_does_not_show_in_its_checkpoint(tmp_path, go):
    weight = torch.ones(3)
    writer = CheckpointWriter(tmp_path, 2, print)
    writer.write(1, {"weight": weight, "nested": [{"same": weight}]})
    weight.zero_()  # training goes on while the file is written
    assert checkpoint.checkpoints(tmp_path) == []
    go.set()
    writer.wait()
    saved = checkpoint.read(tmp_path / "step-000001.pt")
    assert saved["weight"].tolist() == saved["nested"][0]["same"].tolist() == [1, 1, 1]


def test_one_checkpoint_is_finished_before_the_next_begins(tmp_path, monkeypatch):
    at_work: list[int] = []
    most = []
    write = checkpoint.write

    def counted(*arguments: object) -> Path:
        at_work.append(1)
        most.append(len(at_work))
        try:
            return write(*arguments)
        finally:
            at_work.pop()

    monkeypatch.setattr(checkpoint, "write", counted)
    writer = CheckpointWriter(tmp_path, 2, print)
    for step in range(1, 6):
        writer.write(step, {"x": torch.ones(1000)})
    writer.wait()
    assert most == [1] * 5
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000004.pt", "step-000005.pt"]


def full_disk(*_: object) -> Path:
    raise OSError(28, "No space left on device")


def test_a_failure_is_warned_of_and_the_run_goes_on_until_it_lasts(tmp_path, monkeypatch):
    warnings: list[str] = []
    writer = CheckpointWriter(tmp_path, 2, warnings.append)
    writer.write(1, {})
    writer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full_disk)
        writer.write(2, {})
        writer.wait()
    assert len(warnings) == 1
    assert all(part in warnings[0] for part in ("step 2", str(tmp_path), "No space left", "the one before it stays"))
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000001.pt"]
    writer.write(3, {})  # there is room again
    writer.wait()
    monkeypatch.setattr(checkpoint, "write", full_disk)
    for step in range(4, 3 + MOST_FAILURES):
        writer.write(step, {})
        writer.wait()
    writer.write(9, {})
    with pytest.raises(UserError, match="the last 3 neither; make room there"):
        writer.wait()


def test_a_checkpoint_that_is_needed_must_not_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", full_disk)
    writer = CheckpointWriter(tmp_path, 2, print)
    writer.write(1, {})
    with pytest.raises(UserError, match="step 1 could not be written"):
        writer.wait(needed=True)


def test_plain_values_are_copied_with_their_kinds():
    state = {"a": (1, None, "x"), "b": [torch.ones(2, requires_grad=True)], 3: 0.5}
    copied = to_host(state)
    assert copied["a"] == (1, None, "x")
    assert copied[3] == 0.5
    assert not copied["b"][0].requires_grad
    assert copied["b"][0].data_ptr() != state["b"][0].data_ptr()


def test_a_wait_that_is_interrupted_waits_again(tmp_path, go):
    # Ctrl-C or a killed worker strikes in the first wait; the process must not end in the middle of a file.
    def strike(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    writer = CheckpointWriter(tmp_path, 2, print)
    writer.write(1, {"weight": torch.ones(3)})
    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert checkpoint.checkpoints(tmp_path) == []
    threading.Timer(0.2, go.set).start()
    writer.wait()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000001.pt"]
