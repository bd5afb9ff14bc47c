"""Where a run was made: the command, the machine, the versions and the revision of the code, kept beside its recipe."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import powerclip
from powerclip.runtime.files import write_atomic

# Variables that change what a run computes or how fast; others may hold secrets.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "OMP_NUM_THREADS",
    "POWERCLIP_DATA",
    "RANK",
    "SLURM_JOB_ID",
    "WORLD_SIZE",
)


def machine() -> str:
    """The machine that a result was measured on: `NVIDIA H200, torch 2.15.0`, or its CPU threads without a GPU."""
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        threads = torch.get_num_threads()
        where = f"{threads} CPU thread{'s' if threads > 1 else ''} ({platform.machine()})"
    return f"{where}, torch {torch.__version__}"


def environment() -> dict[str, Any]:
    """The present process and its machine, as plain values."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "folder": os.getcwd(),
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "powerclip": powerclip.__version__,
        "revision": revision(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": packages(),
    }


@cache
def revision() -> str | None:
    """The git commit of the code that runs, with `-dirty` when files differ from it; None outside of a checkout."""
    root = Path(powerclip.__file__).resolve().parents[1]
    if not (root / ".git").exists():  # installed: another repository may lie above the site-packages
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@cache
def packages() -> dict[str, str]:
    """Name → version of every installed package."""
    versions = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions() if dist.metadata}
    return dict(sorted((str(name), version) for name, version in versions.items() if name))


def note_environment(path: Path, step: int) -> None:
    """Add this process, which begins after `step`, to the list in `path`."""
    try:
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    except ValueError:  # not worth stopping a run for
        before = []
    sessions = [*(before if isinstance(before, list) else []), {"after_step": step, **environment()}]
    write_atomic(path, (json.dumps(sessions, indent=1) + "\n").encode())
