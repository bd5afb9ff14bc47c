"""What a run writes down as it goes: `metrics.jsonl` for scripts, tensorboard for people, a watch for collapse."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from powerclip.runtime.files import write_atomic

# Terms that are shown beside the loss when the objective reports them; the files have all of them.
SHOWN = ("clip", "alignment", "violation")
# Fifty dead steps in a row do not come from noise: a batch of learning rows always ranks some of them right.
WINDOW = 50
DEAD = 0.99


class Sink(Protocol):
    """Another place that rows go to."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""

    def close(self) -> None:
        """Take leave."""


class MetricsLog:
    """Rows of scalars, appended to `metrics.jsonl` and to tensorboard, and handed to `also`.

    `after` is the step that the run continues from: rows of a later step, which an interrupted run may have left,
    are dropped, as they are about to be written again.
    """

    def __init__(self, path: Path, tensorboard: Path, after: int, also: Sequence[Sink] = ()):
        # Imports half of tensorboard: only those who train pay for it.
        from torch.utils.tensorboard import SummaryWriter

        kept = [row for row in read_metrics(path) if row["step"] <= after] if after else []
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(tensorboard), purge_step=after + 1 if after else None)
        self._also = also

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Note the values of a step. The line reaches the file at once, so that a running run can be watched."""
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


def describe_terms(values: Mapping[str, float]) -> str:
    """The loss, its main terms and the speed of a logged step, as a run shows them."""
    shown = [f"{name} {values[name]:.3f}" for name in ("loss", *SHOWN) if name in values]
    if values.keys() & set(SHOWN) == {"clip"}:  # the loss itself
        shown.pop()
    return "  ".join([*shown, f"{values['samples_per_second']:,.0f} samples/s"])


class CollapseWatch:
    """Tells when alignment is dead: every row's hardest negative wins and every best set is the empty one."""

    def __init__(self) -> None:
        self._recent: deque[Tensor] = deque(maxlen=WINDOW)
        self._warned = False

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Remember the logged parts of a step. Nothing is read back from the GPU here."""
        if "violation" in parts and "empty" in parts:
            self._recent.append(torch.minimum(parts["violation"], parts["empty"]))

    def warning(self) -> str | None:
        """A warning, once, when both shares have stayed at 1 for `WINDOW` steps."""
        if self._warned or len(self._recent) < WINDOW or float(torch.stack(list(self._recent)).min()) < DEAD:
            return None
        self._warned = True
        return (
            f"the alignment loss looks dead: for {WINDOW} steps every hardest negative beat its positive and every "
            "best set of regions was empty. Try alignment.preset=default, or a smaller optim.lr"
        )
