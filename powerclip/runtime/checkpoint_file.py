"""Checkpoint files as they are found and read: verified, and never able to run code.

Training writes them (`train/checkpoint.py`) and resumes from them; the encoders read the model in one.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerclip.errors import UserError, first_line

FORMAT = "powerclip-checkpoint"
VERSION = 1

RUN_FILE = "run.pt"  # of a sharded checkpoint, a folder: what is not sharded; written last

_NAME = re.compile(r"step-(\d+)\.pt")
_FOLDER = re.compile(r"step-(\d+)")


class BadCheckpoint(UserError):
    """A file that is not a checkpoint of powerclip, or is damaged."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """The file of a step: `step-000100.pt`."""
    return folder / f"step-{step:06d}.pt"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    by_step = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(by_step)]


def checkpoint_folders(folder: Path) -> list[Path]:
    """The sharded checkpoints in a folder, the oldest first. One without `run.pt` was never finished."""
    by_step = [
        (int(match[1]), path)
        for path in folder.glob("step-*")
        if (match := _FOLDER.fullmatch(path.name)) and (path / RUN_FILE).is_file()
    ]
    return [path for _, path in sorted(by_step)]


def by_step(folder: Path) -> list[Path]:
    """All checkpoints in a folder, files and sharded ones, the oldest first."""
    return sorted([*checkpoints(folder), *checkpoint_folders(folder)], key=lambda path: int(path.stem[5:]))


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


# ---- the weights in a sharded checkpoint -----------------------------------------------------------------------------

# What torch.distributed.checkpoint's list of tensors is made of. It is a pickle: any other name in it could run code.
_LISTED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "StorageMeta", "MetadataIndex")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("BytesStorageMetadata",)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _ListReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _LISTED and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_list(path: Path) -> Mapping[str, Any]:
    """What a sharded checkpoint lists: name → shape and type. torch would unpickle the list, whatever it names."""
    listed: Mapping[str, Any] = _ListReader(io.BytesIO((path / ".metadata").read_bytes())).load().state_dict_metadata
    return listed


def read_sharded(path: Path) -> dict[str, Any]:
    """What a sharded checkpoint holds apart from the optimiser: `run.pt`, and the whole weights as `encoder`.

    Raises:
        BadCheckpoint: a part is missing, truncated, or not what torch.distributed.checkpoint writes.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    run = read(path / RUN_FILE)
    for name, size in run.get("files", {}).items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise BadCheckpoint(f"{path}: {name} is missing or truncated")
    prefix = "encoder."
    try:
        listed = read_list(path)
        weights: dict[str, Tensor] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in listed.items()
            if key.startswith(prefix)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # The list was found to be harmless above; what it lists is read with weights_only.
            load(weights, storage_reader=FileSystemReader(path), no_dist=True)
    except Exception as error:  # a damaged part can fail in any of the readers' ways
        raise BadCheckpoint(f"{path}: cannot be read as a sharded checkpoint ({first_line(error)})") from None
    return {**run, "encoder": {key.removeprefix(prefix): value for key, value in weights.items()}}
