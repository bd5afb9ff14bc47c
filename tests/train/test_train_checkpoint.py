"""Checkpoints: whole or not there, believed only when they are sound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from powerclip.errors import UserError
from powerclip.train import checkpoint


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
