"""The steps of `step.py` in two checkouts, measured in turn in one run: has a change cost time or memory?

    git worktree add ../before REVISION
    python benchmarks/step_versions.py ../before --trees DATA/captions10k/trees.tsv.gz --only "our CLIP" "NLA, all"
    python benchmarks/step_versions.py ../before --tiny     # on a CPU, in seconds: shows that it works

Each checkout runs its own `benchmarks/step.py` in a process of its own, both on the same device. They prepare at the
same time and then take turns: a step of one, the same step of the other. So a GPU that slows down slows both, and the
ratio of a round is that of neighbours. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import RESULTS, ROOT, markdown, origin, run, write_result

from powerclip.errors import UserError

# What a worker process runs: `step.py` of its checkout, waiting for its turn before each measurement.
WORKER = """
import sys, time
from pathlib import Path

root, turn, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
sys.path[:0] = [f"{root}/benchmarks", root]
sys.argv = ["step.py", *sys.argv[4:]]
import step

measure = step.measure


def in_turn(*arguments, **options):
    while int(turn.read_text()) % 2 != number:
        time.sleep(0.005)
    result = measure(*arguments, **options)
    following = turn.with_name(f"turn-{number}")
    following.write_text(str(int(turn.read_text()) + 1))
    following.replace(turn)
    return result


step.measure = in_turn
step.main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout; this one is the version after")
    parser.add_argument("--tiny", action="store_true", help="towers of two layers, 16 pairs")
    parser.add_argument("--trees", type=Path, help="TSV file of bracketed trees, one caption each")
    parser.add_argument("--only", nargs="+", default=[], help="steps whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3, help="steps in a round, after one that is not timed")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if not (arguments.before / "benchmarks" / "step.py").is_file():
        raise UserError(f"{arguments.before} is no checkout with benchmarks/step.py")
    options = ["--rounds", str(arguments.rounds), "--repeats", str(arguments.repeats)]
    options += ["--tiny"] * arguments.tiny + [part for name in arguments.only for part in ("--only", name)]
    options += ["--trees", str(arguments.trees.resolve())] if arguments.trees else []
    with tempfile.TemporaryDirectory() as folder:
        before, after = measure_in_turn((arguments.before.resolve(), ROOT), options, Path(folder))
    name = "step-versions-tiny" if arguments.tiny else f"step-versions-{after['device']}"
    print(report(before, after, arguments.output, name))


def measure_in_turn(
    roots: tuple[Path, Path], options: list[str], folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of `step.py` in both checkouts; UserError when one of them fails."""
    turn = folder / "turn"
    turn.write_text("0")
    outputs = [folder / str(number) for number in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(root), str(turn), str(number), *options, "--output", str(output)]
        )
        for number, (root, output) in enumerate(zip(roots, outputs, strict=True))
    ]
    try:
        while any(worker.poll() is None for worker in workers):
            failed = next((number for number, worker in enumerate(workers) if worker.poll()), None)
            if failed is not None:  # the other one would wait for its turn for ever
                raise UserError(f"benchmarks/step.py of {roots[failed]} failed; its error stands above")
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    results = []
    for output in outputs:
        (path,) = output.glob("*.json")
        results.append({**json.loads(path.read_text()), "device": path.stem.rpartition("-")[2]})
    return results


def report(before: dict[str, Any], after: dict[str, Any], output: Path, name: str) -> str:
    """Write the ratios; gives the table."""
    rows, cells = [], []
    for old, new in zip(before["rows"], after["rows"], strict=True):
        ratios = [b / a for a, b in zip(old["rounds"], new["rounds"], strict=True)]
        memory = new["gib"] / old["gib"] if old["gib"] and new["gib"] else None
        row = {"name": old["name"], "before_ms": old["ms"], "after_ms": new["ms"], "ratio": statistics.median(ratios)}
        row |= {"ratios": ratios, "before_gib": old["gib"], "after_gib": new["gib"], "memory_ratio": memory}
        rows.append(row)
        cells.append(
            [
                row["name"],
                f"{old['ms']:.1f}",
                f"{new['ms']:.1f}",
                f"{row['ratio']:.3f}",
                f"{min(ratios):.3f} … {max(ratios):.3f}",
                "–" if memory is None else f"{memory:.3f}",
            ]
        )
    heads = ("step", "before, ms", "after, ms", "after / before", "rounds", "memory, after / before")
    text = "# A training step before and after a change\n\n"
    text += ", ".join(f"{key} {value}" for key, value in after["batch"].items()) + "\n\n" + markdown(cells, heads)
    provenance = {**origin(), "before": before["origin"]["commit"]}
    path = write_result(output, name, provenance, {"batch": after["batch"], "rows": rows}, text)
    return f"{text}\n\n{path}.json, .md"


if __name__ == "__main__":
    run(main)
