"""What the speed benchmarks share: `measure`, and what a result says about its origin."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from powerclip.analysis.measure import Measurement, measure
from powerclip.errors import UserError
from powerclip.report.table import Table
from powerclip.runtime.environment import machine

__all__ = ["RESULTS", "Measurement", "markdown", "measure", "origin", "run", "write_result"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def run(main: Callable[[], None]) -> None:
    """Run a benchmark. What the user got wrong is one line and exit code 2, as with `powerclip`."""
    try:
        main()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def origin() -> dict[str, str]:
    """When, where and from what a result was made."""
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "triton", "open_clip_torch")
        if any(importlib.metadata.distributions(name=name))
    }
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _git("describe", "--always", "--dirty", "--exclude=*"),
        "machine": machine(),
        **versions,
        "cuda": torch.version.cuda or "none",
        "command": " ".join(["python", Path(sys.argv[0]).name, *map(_named, sys.argv[1:])]),
    }


def _named(argument: str) -> str:
    """An argument without the folders of the machine that it was typed on."""
    return f"…/{Path(argument).name}" if Path(argument).is_absolute() else argument


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def markdown(rows: Sequence[Sequence[object]], heads: Sequence[str]) -> str:
    """The rows as a Markdown table."""
    return Table.plain(heads, rows).markdown()


def write_result(folder: Path, name: str, made: dict[str, str], data: dict[str, Any], text: str) -> Path:
    """`<date>-<name>.json` with everything and `.md` to read; gives the path without its ending, for a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{made['date']}-{name}"
    path.with_suffix(".json").write_text(json.dumps({"origin": made, **data}, indent=1) + "\n")
    facts = "\n".join(f"- {key}: {value}" for key, value in made.items())
    path.with_suffix(".md").write_text(f"{text}\n\n{facts}\n")
    return path
