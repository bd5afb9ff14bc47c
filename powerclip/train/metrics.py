"""Where the metrics of a run go: `metrics.jsonl`, tensorboard and, where `train.wandb` is set, Weights & Biases."""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.train.recipe import Recipe


class Sink(Protocol):
    """Another destination of the metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""

    def close(self) -> None:
        """Flush and close."""


class MetricsLog:
    """Rows of scalars, appended to `metrics.jsonl` and to tensorboard, and handed to `also`.

    `after` is the step that the run continues from: rows of a later step, which an interrupted run may have left,
    are dropped, as they are about to be written again.
    """

    def __init__(self, path: Path, tensorboard: Path, after: int, also: Sequence[Sink] = ()):
        # A slow import, which only training needs.
        from torch.utils.tensorboard import SummaryWriter

        rows = [row for row in read_metrics(path) if row["step"] <= after] if after else []
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(tensorboard), purge_step=after + 1 if after else None)
        self._also = also

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step. The line reaches the file at once, so that a running run can be watched."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(name if "/" in name else f"train/{name}", value, step)
        for sink in self._also:
            sink.write(step, values)

    def close(self) -> None:
        """Write out what tensorboard still holds."""
        self._file.close()
        self._tensorboard.close()
        for sink in self._also:
            sink.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """The rows of a `metrics.jsonl` up to the first that is damaged, such as a last line that was cut off."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not isinstance(row, dict) or "step" not in row:
            return
        yield row


def require_wandb() -> Any:
    """The wandb package; UserError when it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise UserError(
            "train.wandb: the package wandb is not installed; pip install 'powerclip[wandb]', or train.wandb=null"
        ) from None


class WandbLog:
    """One run in a project. A run that continues keeps its identity, which lies in `folder`."""

    def __init__(self, project: str, recipe: Recipe, folder: Path, *, resumed: bool):
        wandb = require_wandb()
        note = folder / "wandb-id"
        identity = note.read_text(encoding="utf-8").strip() if resumed and note.is_file() else secrets.token_hex(4)
        write_atomic(note, f"{identity}\n".encode())
        self._run = wandb.init(
            project=project, name=folder.name, id=identity, resume="allow", dir=str(folder), config=asdict(recipe)
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class NullLogger:
    """Stands in for `MetricsLog` and `CheckpointWriter` on all ranks but the main one: every call does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
