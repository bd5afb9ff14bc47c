"""Checkpoint files as they are found and read: verified, and never able to run code.

Training writes them (`train/checkpoint.py`) and resumes from them; the encoders read the model in one.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from powerclip.errors import UserError, first_line

FORMAT = "powerclip-checkpoint"
VERSION = 1

_NAME = re.compile(r"step-(\d+)\.pt")


class BadCheckpoint(UserError):
    """A file that is not a checkpoint of powerclip, or is damaged."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """The file of a step: `step-000100.pt`."""
    return folder / f"step-{step:06d}.pt"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    by_step = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(by_step)]


def is_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint of a run, by its name or by its content; it may still be damaged."""
    if not path.is_file():
        return False
    if _NAME.fullmatch(path.name):
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            values = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return any(FORMAT.encode() in archive.read(name) for name in values)
    except (OSError, zipfile.BadZipFile):
        return False


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
        raise BadCheckpoint(f"{path}: cannot be read as a checkpoint ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise BadCheckpoint(f"{path}: not a checkpoint of powerclip train")
    if state.get("version") != VERSION:
        raise BadCheckpoint(
            f"{path}: checkpoint format {state.get('version')}, this version of powerclip reads {VERSION}"
        )
    return state
