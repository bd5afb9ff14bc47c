"""Checkpoints: whole or not there, read only when they are sound, and written without holding up the run."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from powerclip.errors import UserError
from powerclip.train import checkpoint
from powerclip.train.checkpoint import MAX_FAILURES, CheckpointWriter, to_host


def state(value: float) -> dict[str, object]:
    return {"encoder": {"weight": torch.full((64, 64), float(value))}, "random": {"python": (3, (1, 2), None)}}


def filled(folder: Path, steps: list[int], keep: int = 10) -> list[Path]:
    return [checkpoint.write(folder, step, state(step), keep) for step in steps]


def test_what_is_written_is_read_back(tmp_path):
    (path,) = filled(tmp_path, [7])
    read = checkpoint.read(path)
    assert read["step"] == 7
    assert torch.equal(read["encoder"]["weight"], torch.full((64, 64), 7.0))
    assert read["random"]["python"] == (3, (1, 2), None)


def test_the_last_k_are_kept_counted_by_step_and_not_by_name(tmp_path):
    filled(tmp_path, [999_998, 999_999, 1_000_000, 1_000_001], keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-1000000.pt", "step-1000001.pt"]


def test_a_write_that_fails_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    filled(tmp_path, [5])
    before = sorted(os.listdir(tmp_path))

    def full_disk(value: object, file: object) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(tmp_path, 10, state(10), keep=1)
    assert sorted(os.listdir(tmp_path)) == before


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.find(torch.full((1,), 20.0).numpy().tobytes() * 8)  # inside the weight of step 20
    assert place > 0
    data[place] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": {}}, path)


def from_the_future(path: Path) -> None:
    torch.save({"format": checkpoint.FORMAT, "version": checkpoint.VERSION + 1}, path)


class Code:
    """Stands for a pickle that would run something."""


def with_code(path: Path) -> None:
    torch.save({"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "x": Code()}, path)


SPOILERS = [tear, flip_a_bit, empty, foreign, from_the_future, with_code]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_bad_checkpoint_is_refused_in_one_line_and_the_previous_one_used(tmp_path, spoil):
    *_, last = filled(tmp_path, [10, 20])
    spoil(last)
    with pytest.raises(checkpoint.BadCheckpoint) as caught:
        checkpoint.read(last)
    assert str(last) in str(caught.value)
    assert "\n" not in str(caught.value)

    warnings: list[str] = []
    assert checkpoint.newest(tmp_path, warnings.append)["step"] == 10
    assert len(warnings) == 1
    assert "step-000020.pt" in warnings[0]
    assert "step-000010.pt" in warnings[0]


def test_a_refused_checkpoint_does_not_count_among_those_kept(tmp_path):
    *_, last = filled(tmp_path, [10, 20])
    tear(last)
    checkpoint.newest(tmp_path, lambda _: None)
    filled(tmp_path, [15], keep=1)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000015.pt"]
    assert checkpoint.newest(tmp_path, lambda _: None)["step"] == 15


def test_when_none_is_good_the_error_says_so_and_nothing_is_moved(tmp_path):
    for path in filled(tmp_path, [10, 20]):
        tear(path)
    with pytest.raises(UserError, match="no good checkpoint is left"):
        checkpoint.newest(tmp_path, lambda _: None)
    assert len(checkpoint.checkpoints(tmp_path)) == 2


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    assert checkpoint.newest(tmp_path / "none", lambda _: None) is None


# ---- in the background -----------------------------------------------------------------------------------------------


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
    for step in range(4, 3 + MAX_FAILURES):
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
