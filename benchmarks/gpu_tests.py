"""Everything that needs a GPU, in one command: the tests marked `gpu` and those of Triton's kernels.

    make test-gpu                                    # on a machine with an NVIDIA GPU, under five minutes
    python benchmarks/gpu_tests.py -- -k fp8 -x      # what follows -- goes to pytest; no record is written

Continuous integration has no GPU: there `make test` runs the kernels in Triton's interpreter and skips the rest. The
record, a JSON file and a Markdown table, says what ran on what and how it ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from measure import RESULTS, ROOT, markdown, origin, run, write_result

from powerclip.errors import UserError

MARKED = "gpu or kernels"
# Kernels compile on the host: several tests at a time, each in a process of its own.
PROCESSES = 14
SECONDS = 290.0


@dataclass(frozen=True)
class Case:
    """One test."""

    file: str
    name: str
    outcome: str  # passed, failed or skipped
    seconds: float
    message: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the record")
    parser.add_argument("pytest", nargs="*", help="after --: more arguments for pytest")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError(
            "torch finds no NVIDIA GPU here; `make test` runs the kernels in Triton's interpreter and skips what "
            "needs one"
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        code = run_pytest(path, arguments.pytest)
        cases = read_cases(path) if path.exists() else []
    if not arguments.pytest:
        print(record(cases, code, time.monotonic() - began, arguments.output))
    sys.exit(code)


def run_pytest(path: Path, more: list[str]) -> int:
    """Run the tests, their results into an XML file; gives pytest's exit code, or 124 when they took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", MARKED, f"--junitxml={path}", "-o", "junit_family=xunit1"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(PROCESSES, os.cpu_count() or 1))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    try:
        return subprocess.run([*command, *more], cwd=ROOT, env=environment, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"error: the tests were ended after {SECONDS:.0f} s", file=sys.stderr)
        return 124


def read_cases(path: Path) -> list[Case]:
    """The tests of pytest's XML file."""
    cases = []
    for case in ElementTree.parse(path).iter("testcase"):
        outcome, message = "passed", ""
        for tag, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            if (part := case.find(tag)) is not None:
                outcome, message = name, " ".join(part.get("message", "").split())[:200]
        file = case.get("file") or case.get("classname", "").replace(".", "/")
        cases.append(Case(file, case.get("name", ""), outcome, float(case.get("time", 0)), message))
    return cases


def record(cases: list[Case], code: int, seconds: float, folder: Path) -> str:
    """Write what ran and how it ended; return the table."""
    by_file = {file: [case for case in cases if case.file == file] for file in sorted({case.file for case in cases})}
    rows = []
    for file, those in by_file.items():
        counts = Counter(case.outcome for case in those)
        ends = [counts["passed"], counts["failed"], counts["skipped"]]
        rows.append([f"`{file}`", *ends, f"{sum(case.seconds for case in those):.0f}"])
    total = Counter(case.outcome for case in cases)
    verdict = "all passed" if code == 0 else f"pytest ended with {code}"
    text = f"# Tests on a GPU: {verdict}\n\n"
    text += f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped, in {seconds:.0f} s\n\n"
    text += markdown(rows, ["file", "passed", "failed", "skipped", "s"])
    for title, outcome in (("Failed", "failed"), ("Skipped", "skipped")):
        those = [case for case in cases if case.outcome == outcome]
        if those:
            lines = "\n".join(f"- `{case.file}` {case.name}: {case.message}" for case in those)
            text += f"\n\n{title}:\n\n{lines}"
    data = {"exit": code, "seconds": round(seconds, 1), **total, "tests": [asdict(case) for case in cases]}
    path = write_result(folder, "gpu-tests", origin(), data, text)
    return f"{text}\n\n{path}.json, .md"


if __name__ == "__main__":
    run(main)
