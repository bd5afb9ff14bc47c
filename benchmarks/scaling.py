"""From one GPU to many, on paper: what ranks send each other in a step, and what is left of its speed.

    python benchmarks/scaling.py                             # prints the tables
    python benchmarks/scaling.py --write docs/scaling.md     # puts them between the marks in the page

Bytes and link times follow from `powerclip/train/communication.py`. Step times need two measurements of one GPU: the
parts of a step that sees no other rank's captions, `benchmarks/results/*-step-parts-cuda.json` of `step_parts.py`, and
the step of one rank of several, `*-step-cuda.json` of `step.py`. The difference of the two is what more captions cost.
Without them those columns are left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import RESULTS, markdown, run

from powerclip.errors import UserError
from powerclip.train.communication import FAST, SLOW, parallel_efficiency, seconds, traffic

BEGIN, END = "<!-- made by benchmarks/scaling.py -->", "<!-- end -->"
RANKS = (8, 64, 512)
PAIRS = 4096  # of the paper's batch
WIDTH, NODES = 512, 12.0  # D of ViT-B/16, and a mean K of web captions
PARAMETERS = 149_620_738  # ViT-B/16 with PowerCLIP's scale
GATHERED = "PowerCLIP-NLA, all"  # of step.py, the setting that step_parts.py has: the default
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """Times of one GPU, in seconds."""

    machine: str
    pairs: int  # of the batch that it was measured with
    fixed: float  # gradient norm and AdamW: the same for any batch
    share: float  # what grows with the GPU's own pairs, for `pairs` of them
    pair: float  # to score one image with one caption, with the gradient

    def compute(self, ranks: int, batch: int) -> float:
        """A step of one of `ranks` GPUs by itself: towers with its share, all pairs of that with the batch, AdamW."""
        local = batch / ranks
        return self.fixed + self.share * local / self.pairs + self.pair * local * batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, help="a result of step_parts.py. [default: the newest of a GPU]")
    parser.add_argument("--steps", type=Path, help="a result of step.py. [default: the newest of a GPU]")
    parser.add_argument("--write", type=Path, help="a page with the marks to write between")
    arguments = parser.parse_args()
    parts = arguments.parts or max(RESULTS.glob("*-step-parts-cuda.json"), default=None)
    steps = arguments.steps or max(RESULTS.glob("*-step-cuda.json"), default=None)
    text = tables(json.loads(parts.read_text()), json.loads(steps.read_text())) if parts and steps else tables()
    if arguments.write is None:
        print(text)
        return
    page = arguments.write.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{arguments.write} has no marks {BEGIN} and {END}")
    arguments.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def tables(parts: dict[str, Any] | None = None, steps: dict[str, Any] | None = None) -> str:
    """All tables as Markdown."""
    measured = None if parts is None or steps is None else read(parts, steps)
    return "\n".join(
        [
            *([] if parts is None else [step_table(parts), ""]),
            f"**The paper's batch of {PAIRS:,}, shared by more and more GPUs** (MiB that each GPU sends in a step):",
            "",
            strong_table(measured),
            "",
            f"**{per_gpu(measured)} pairs on each GPU, however many there are:**",
            "",
            weak_table(measured),
        ]
    )


def read(parts: dict[str, Any], steps: dict[str, Any]) -> Measured:
    """From the results of `step_parts.py` and `step.py`."""
    times, pairs = parts["parts"]["powerclip"], parts["batch"]["pairs"]
    rows, columns = map(int, steps["batch"]["pairs"].split(" × "))
    gathered = next((row["ms"] for row in steps["rows"] if row["name"] == GATHERED), None)
    if gathered is None or rows * columns == pairs * pairs:
        raise UserError(f"the result of step.py needs the step {GATHERED!r}, with captions of other ranks (--ranks 8)")
    fixed, pair = times["norm"] + times["optimiser"], (gathered - times["step"]) / (rows * columns - pairs * pairs)
    share = times["step"] - fixed - pair * pairs * pairs
    return Measured(parts["origin"]["machine"], pairs, fixed / 1000, share / 1000, pair / 1000)


def per_gpu(measured: Measured | None) -> int:
    return measured.pairs if measured else 512


def step_table(data: dict[str, Any]) -> str:
    names = ("copy", "towers", "loss", "backward", "norm", "optimiser", "step")
    rows = [
        [objective, *(f"{times[name]:.1f}" for name in names), f"{1000 * data['batch']['pairs'] / times['step']:,.0f}"]
        for objective, times in data["parts"].items()
    ]
    facts = ", ".join(f"{name} {value}" for name, value in data["batch"].items())
    head = f"**Measured: {data['model']}, {facts}, {data['origin']['machine']}** (ms; `benchmarks/step_parts.py`):"
    return f"{head}\n\n" + markdown(rows, ("", *names[:-1], "whole step", "pairs/s"))


def strong_table(measured: Measured | None) -> str:
    rows = []
    for ranks in RANKS:
        sent = traffic(ranks, PAIRS, WIDTH, PARAMETERS, NODES)
        rows.append([ranks, PAIRS // ranks, *cells(sent, ranks, PAIRS, measured)])
    return markdown(rows, heads(measured))


def weak_table(measured: Measured | None) -> str:
    rows = []
    for ranks in RANKS:
        batch = per_gpu(measured) * ranks
        sent = traffic(ranks, batch, WIDTH, PARAMETERS, NODES)
        rows.append([ranks, f"{batch:,}", *cells(sent, ranks, batch, measured)])
    return markdown(rows, heads(measured, "pairs in all"))


def heads(measured: Measured | None, pairs: str = "pairs on each") -> tuple[str, ...]:
    common = ("GPUs", pairs, "gradients", "embeddings", "phrases", "ms, 8 × 400 Gb/s", "ms, 100 Gb/s")
    return (*common, "ms of compute", "efficiency, 8 × 400 Gb/s", "100 Gb/s") if measured else common


def cells(sent: Any, ranks: int, batch: int, measured: Measured | None) -> list[str]:
    shown = [f"{value / MIB:,.0f}" for value in (sent.gradients, sent.embeddings, sent.phrases)]
    shown += [f"{1000 * seconds(sent.total, ranks, links):,.1f}" for links in (FAST, SLOW)]
    if measured is None:
        return shown
    compute = measured.compute(ranks, batch)
    shares = [parallel_efficiency(compute, sent, ranks, links) for links in (FAST, SLOW)]
    return [*shown, f"{1000 * compute:,.1f}", *(f"{share:.0%}" for share in shares)]


if __name__ == "__main__":
    run(main)
