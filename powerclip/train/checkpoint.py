"""Checkpoint files: written whole or not at all, checked before they are believed, the last few kept.

A checkpoint is one `torch.save` archive of plain values and tensors, so that reading it can run no code.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from powerclip.errors import UserError

FORMAT = "powerclip-checkpoint"
VERSION = 1

_NAME = re.compile(r"step-(\d+)\.pt")


class BadCheckpoint(UserError):
    """A file that is not a checkpoint of ours, or no longer a whole one."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """The file of a step: `step-000100.pt`."""
    return folder / f"step-{step:06d}.pt"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def write(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write the state of a step and drop all but the last `keep` checkpoints.

    The file gets its name only once its bytes are on the disk: whoever is killed on the way leaves the previous
    checkpoint as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(folder, step)
    unfinished = folder / f".{path.name}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(folder)
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint file, on the CPU; BadCheckpoint when it is torn, corrupt or not ours."""
    try:
        # torch reads tensors without looking at their checksums, so a flipped bit would become a wrong weight.
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise BadCheckpoint(f"{path}: corrupt checkpoint (checksum of {broken} is wrong)")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (UserError, FileNotFoundError, PermissionError):
        raise
    except zipfile.BadZipFile:
        raise BadCheckpoint(f"{path}: torn or not a checkpoint at all") from None
    except Exception as error:  # a damaged archive can fail in any of the readers' ways
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadCheckpoint(f"{path}: cannot be read as a checkpoint ({reason})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise BadCheckpoint(f"{path}: not a checkpoint of powerclip train")
    if state.get("version") != VERSION:
        raise BadCheckpoint(
            f"{path}: checkpoint format {state.get('version')}, this version of powerclip reads {VERSION}"
        )
    return state


def newest(folder: Path, warn: Callable[[str], None], *, afresh: bool = False) -> dict[str, Any] | None:
    """The newest good state in a folder, or None when it holds no checkpoint.

    A bad file is named to `warn` and set aside as `….refused`, so that it neither comes up again nor counts among
    those that are kept. When there are checkpoints and none is good: a UserError, or None with `afresh`.
    """
    for leftover in folder.glob(".step-*.unfinished"):
        leftover.unlink(missing_ok=True)
    refused: list[tuple[Path, BadCheckpoint]] = []
    for path in reversed(checkpoints(folder)):
        try:
            state = read(path)
        except BadCheckpoint as error:
            refused.append((path, error))
            continue
        for bad, reason in refused:
            _refuse(bad)
            warn(f"{reason}; going back to {path.name}")
        return state
    if refused and afresh:
        for bad, reason in refused:
            _refuse(bad)
            warn(f"{reason}; no good checkpoint is left, starting afresh")
        return None
    if refused:
        more = f" (and {len(refused) - 1} older, bad as well)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0][1]}{more}; no good checkpoint is left: start again with --overwrite")
    return None


def _refuse(path: Path) -> None:
    path.rename(path.with_name(path.name + ".refused"))


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk: without it a rename may not survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
