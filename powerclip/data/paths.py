"""Paths as a recipe writes them: with environment variables and patterns, resolved when a run needs the files."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from powerclip.errors import UserError

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def expand_path(text: str, setting: str) -> Path:
    """The path that `text`, the value of a recipe's `setting`, stands for.

    Raises:
        UserError: a variable in it is not set.
    """
    expanded = os.path.expanduser(os.path.expandvars(text))
    unset = _VARIABLE.search(expanded)
    if unset:
        name = unset[1].strip("{}")
        raise UserError(f"{setting}: {text}: the environment variable {name} is not set (export {name}=FOLDER)")
    return Path(expanded)


def expand_pattern(text: str, setting: str) -> list[Path]:
    """The files that a path or a pattern (`train-*.tar`) stands for, in order.

    Raises:
        UserError: a variable in it is not set, or nothing matches.
    """
    pattern = expand_path(text, setting)
    paths = sorted(map(Path, glob.glob(str(pattern))))
    if not paths:
        raise UserError(f"{setting}: nothing matches {pattern}")
    return paths


def user_cache(name: str) -> Path:
    """A folder of the user's cache, for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powerclip" / name
