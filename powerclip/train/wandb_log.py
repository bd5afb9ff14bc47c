"""The metrics of a run in Weights & Biases, for recipes that ask for it (`train.wandb`)."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.train.recipe import Recipe


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
