"""The outcome of a finished run as `results.json`: its scores, its cost, its last logged values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.settings import check

FORMAT = 2  # 1, which files did not say: other names of scores, and images of shards squashed for evaluation
# The first logged steps compile, warm caches up and wait for the first batches.
WARM_UP_ROWS = 2


class OutdatedResults(UserError):
    """Results that another version has written, with other metrics."""


@dataclass(frozen=True)
class Results:
    """The results of a finished run."""

    steps: int
    seconds: float  # of the process that finished the run
    seconds_per_step: float | None  # median over the logged intervals, the first ones left out
    scores: dict[str, float] = field(default_factory=dict)  # `TASK/metric` → share of right answers, 0 to 1
    last: dict[str, float] = field(default_factory=dict)  # what was logged at the last step
    format: int = FORMAT


def write_results(path: Path, results: Results) -> None:
    """Write the file atomically."""
    write_atomic(path, (json.dumps(asdict(results), indent=1) + "\n").encode())


def read_results(path: Path) -> Results:
    """Read the file back; UserError when it is damaged, not one of ours or of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results = Results(**check(content, Results, str(path)))
        if not all(isinstance(value, int | float) for value in (*results.scores.values(), *results.last.values())):
            raise TypeError("a score or a logged value is not a number")
    except (ValueError, TypeError, UserError):
        raise UserError(f"{path}: not the results of a run; remove it to run again") from None
    if content.get("format") != FORMAT:
        raise OutdatedResults(f"{path}: results of another version, with other metrics; remove it to run again")
    return results


def seconds_per_step(rows: Iterable[Mapping[str, float]], batch_size: int) -> float | None:
    """The median time of a step, from the speeds that were logged; None when nothing was."""
    times = [batch_size / row["samples_per_second"] for row in rows if row.get("samples_per_second")]
    return median(times[WARM_UP_ROWS:] or times) if times else None
