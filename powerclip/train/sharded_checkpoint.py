"""Sharded checkpoints: every rank writes its own part of the weights and moments, and none gathers them all.

A checkpoint is a folder, `step-000100/`: torch.distributed.checkpoint's files for what is sharded, and `run.pt`, in the
format of a whole checkpoint, for the rest. A run continues from it on any number of ranks, sharded or not.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powerclip.errors import UserError, first_line
from powerclip.runtime import checkpoint_file
from powerclip.runtime.checkpoint_file import RUN_FILE, BadCheckpoint, checkpoint_folders
from powerclip.runtime.distributed import Ranks
from powerclip.train import checkpoint

if TYPE_CHECKING:
    from powerclip.train.state import TrainState


def write(folder: Path, state: TrainState, also: Mapping[str, Any], keep: int, ranks: Ranks) -> Path:
    """Write the state of a run and drop all but the last `keep` sharded checkpoints. All ranks must call it.

    The folder gets its name once everything in it is on the disk: a kill meanwhile leaves the checkpoint before it.

    Raises:
        UserError: a rank could not write its part.
    """
    path = folder / f"step-{state.step:06d}"
    unfinished = folder / f".{path.name}.unfinished"
    ranks.broadcast(lambda: _clear(unfinished))
    rest = state.snapshot(sharded=True)  # collects from all ranks
    ranks.raise_on_all(lambda: _write_parts(unfinished, state, ranks))
    ranks.broadcast(lambda: _finish(path, unfinished, {"step": state.step, **rest, **also}, keep))
    return path


def read(path: Path) -> dict[str, Any]:
    """What `run.pt` holds of a sharded checkpoint; BadCheckpoint when a file is missing or has another size."""
    run = checkpoint_file.read(path / RUN_FILE)
    for name, size in run["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise BadCheckpoint(f"{path}: {name} is missing or truncated")
    try:
        checkpoint_file.read_list(path)
    except Exception as error:  # pickle fails in many ways
        raise BadCheckpoint(f"{path}: .metadata is not what torch.distributed.checkpoint writes ({error})") from None
    return run


def load_parts(path: Path, encoder: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Fill the weights, and the moments of the optimiser, with what `path` holds, however many ranks wrote it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    saved = checkpoint_file.read_list(path)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments: dict[str, Tensor] = {}
    for key, entry in saved.items():
        if key.startswith("optimizer."):
            parameter = parameters[int(key.split(".")[1])]
            like = entry.size == parameter.shape and parameter.ndim > 0
            moments[key] = torch.zeros_like(parameter) if like else torch.zeros(entry.size, dtype=torch.float32)
    weights = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    try:
        with _quiet():
            load({**weights, **moments}, storage_reader=reader, no_dist=ranks.is_single)
    except Exception as error:  # a damaged file can fail in any of the readers' ways
        raise UserError(
            f"{path}: cannot be read as a sharded checkpoint ({first_line(error)}); "
            "move it away, and --resume goes on from an older one"
        ) from None
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        _, number, name = key.split(".")
        state.setdefault(int(number), {})[name] = value.detach()
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def newest_state(
    folder: Path, warn: Callable[[str], None], ranks: Ranks, *, required: bool
) -> tuple[dict[str, Any] | None, Path | None]:
    """The newest good state in a folder, whole or sharded, and the folder of its parts when it is sharded.

    Bad checkpoints are refused, and `required` is meant, as in `checkpoint.newest`.
    """
    name = ranks.broadcast(lambda: _newest_sharded(folder, warn, required=required))
    if name is not None:
        return read(folder / name), folder / name
    return checkpoint.newest(folder, warn, ranks, required=required), None


def _newest_sharded(folder: Path, warn: Callable[[str], None], *, required: bool) -> str | None:
    """The name of the newest good sharded checkpoint, unless a whole one is newer."""
    for leftover in folder.glob(".step-*.unfinished"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
    whole = checkpoint_file.checkpoints(folder)
    refused: BadCheckpoint | None = None
    for path in reversed(checkpoint_folders(folder)):
        if whole and int(whole[-1].stem.removeprefix("step-")) >= _step(path):
            return None
        try:
            read(path)
        except BadCheckpoint as error:
            refused = error
            path.rename(path.with_name(path.name + ".refused"))
            warn(f"{error}; going back to the checkpoint before it")
        else:
            return path.name
    if refused and required and not whole:
        raise UserError(f"{refused}; no good checkpoint is left: start again with --overwrite")
    return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _clear(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _write_parts(folder: Path, state: TrainState, ranks: Ranks) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    parts = {f"encoder.{name}": value for name, value in state.encoder.state_dict().items()}
    for number, values in state.optimizer.state_dict()["state"].items():
        parts |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
    try:
        with _quiet():
            save(parts, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), no_dist=ranks.is_single)
    except Exception as error:  # torch wraps a full disk into an exception of its own
        raise UserError(
            f"the sharded checkpoint of step {state.step} could not be written to {folder.parent} "
            f"({first_line(error)}); make room there and continue with --resume"
        ) from error


def _finish(path: Path, unfinished: Path, run: Mapping[str, Any], keep: int) -> None:
    files = {file.name: file.stat().st_size for file in unfinished.iterdir()}
    header = {"format": checkpoint_file.FORMAT, "version": checkpoint_file.VERSION}
    content = {**header, **checkpoint.to_host(run), "files": files}
    with open(unfinished / RUN_FILE, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    checkpoint.sync_folder(unfinished)
    shutil.rmtree(path, ignore_errors=True)  # of a run that went back to an older one and came here again
    os.replace(unfinished, path)
    checkpoint.sync_folder(path.parent)
    for old in checkpoint_folders(path.parent)[:-keep]:
        shutil.rmtree(old)
