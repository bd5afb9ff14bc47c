"""Every kernel compiles for GPUs that are not there: the interpreter also runs what none would take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "powerclip" / "alignment" / "kernels"
FUNCTIONS = {"powerset_sums", "set_sums", "wins"}  # no kernels of their own: compiled with those that call them


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(capability, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "compile_kernels.py"), str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(int(size) > 0 for _, _, size in lines)
    with_kernels = {path.stem for path in KERNELS.glob("*.py") if "@triton.jit" in path.read_text()}
    assert {module for module, _, _ in lines} == with_kernels - FUNCTIONS
