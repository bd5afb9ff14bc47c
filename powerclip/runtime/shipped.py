"""What comes with the package: recipes and studies, found by their name or their path in the repository; a model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from powerclip.errors import UserError, nearest

Folder = Literal["recipes", "studies"]

MODEL = "powerclip-scenes"  # a small model that knows the embedded scenes: what commands take without --model
MODEL_FOLDER = Path(__file__).resolve().parents[1] / "models" / MODEL


def find_yaml(name: str | Path, folder: Folder) -> Path:
    """A file as given, else the shipped one of that name: `quickstart/clip`, or `recipes/quickstart/clip.yaml`.

    Raises:
        UserError: neither is there; the message suggests the nearest name.
    """
    path, kind = Path(name), {"recipes": "recipe", "studies": "study"}[folder]
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{kind} {path} is a folder; name a .yaml file in it")
    shipped = shipped_yaml(folder)
    # `recipes/quickstart/clip.yaml` is how the repository spells it; it should work from anywhere.
    parts = path.parts[1:] if path.parts[:1] == (folder,) else path.parts
    key = Path(*parts).with_suffix("").as_posix() if parts else ""
    if key in shipped:
        return shipped[key]
    hint = nearest(key, list(shipped)) or (f"; shipped: {', '.join(shipped)}" if shipped else "")
    raise UserError(f"no {kind} file {path}{hint}")


def shipped_yaml(folder: Folder) -> dict[str, Path]:
    """Name → file of what comes with the package in one of the two folders."""
    package = Path(__file__).resolve().parents[1]
    root = package / folder
    if not root.is_dir():  # an editable install: the repository keeps them beside the package
        root = package.parent / folder
        if not (package.parent / "pyproject.toml").is_file():
            return {}
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(root.rglob("*.yaml"))}
