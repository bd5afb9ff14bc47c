"""What the GPU does in a training step: time by kind of kernel, gaps between kernels, and the longest kernels.

    python benchmarks/step_profile.py --trees DATA/captions10k/trees.tsv.gz --only "our CLIP"    # on a GPU, 2 minutes

The steps are those of `step.py`, by their names there. Several kernels may run at a time (two streams): the kinds may
then add up to more than the step. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import RESULTS, markdown, origin, run, write_result
from step import OURS, SimulatedRanks, make_batch, our_step

from powerclip.alignment.config import AlignmentConfig
from powerclip.errors import UserError
from powerclip.train.recipe import Recipe
from powerclip.train.sections import ModelSection, RegionsSection, TrainSection

# Parts of kernels' names, the first kind that fits counts. What inductor has fused is named after what it computes.
KINDS = {
    "attention": ("fmha", "flash", "sdpa", "attention", "mha"),
    "products": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk", "matmul"),
    "optimiser and norm": ("multi_tensor_apply", "foreach", "lpnorm"),
    "fused, sums over rows or columns": ("triton_red", "triton_per"),
    "fused, element by element": ("triton_poi", "triton_for"),
    "alignment": ("_scores", "_winners", "_gradients", "best_sets", "_halves", "_piece", "_of_pairs"),
    "copies": ("memcpy", "memset"),
}
OTHER = "other"


@dataclass(frozen=True)
class Profile:
    """Milliseconds of one step."""

    span: float  # from the first kernel's begin to the last one's end
    busy: float  # some kernel runs
    kinds: dict[str, float]
    kernels: list[tuple[str, float, float]]  # name, ms, launches; the longest first
    launches: float

    @property
    def gaps(self) -> float:
        return self.span - self.busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16", help="an open_clip model")
    parser.add_argument("--batch", type=int, default=512, help="pairs")
    parser.add_argument("--regions", type=int, default=10, help="M")
    parser.add_argument("--trees", type=Path, help="TSV file of bracketed trees, one caption each")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks; all but one are simulated")
    parser.add_argument("--only", action="append", help="steps whose name contains this; may be given several times")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("step_profile.py reads the times of a GPU's kernels, and there is no GPU here")
    model = ModelSection(name=arguments.model)
    batch = make_batch(model, arguments.batch, arguments.regions, arguments.trees).to("cuda")
    wanted = [name for name in OURS if any(part in name for part in arguments.only or ["our CLIP"])]
    profiles = {}
    for name in wanted:
        objective, settings = OURS[name]
        recipe = Recipe(
            model=model,
            objective=objective,
            regions=RegionsSection(count=arguments.regions),
            alignment=AlignmentConfig(**settings),
            train=TrainSection(batch_size=arguments.batch, device="cuda"),
        )
        profiles[name] = profile(our_step(recipe, batch, SimulatedRanks(0, arguments.ranks)), arguments.steps)
    print(report(profiles, arguments.output))


def profile(step: Callable[[], object], steps: int, warmup: int = 4) -> Profile:
    """What the GPU does in one step, as the mean of some."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_device = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = [(event.name, event.time_range.start, event.time_range.end) for event in on_device]
    return summary(times, steps)


def summary(events: Iterable[tuple[str, float, float]], steps: int) -> Profile:
    """Kernels' names, begins and ends, in µs, of some steps, as the milliseconds of one."""
    events = sorted(events, key=lambda event: event[1])
    per_step = 1 / (1000 * steps)
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    busy, until = 0.0, events[0][1]
    for name, begin, end in events:
        kinds[kind(name)] += (end - begin) * per_step
        names[name] += (end - begin) * per_step
        launches[name] += 1
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    kernels = [(name, ms, launches[name] / steps) for name, ms in names.most_common()]
    span = (until - events[0][1]) * per_step
    return Profile(span, busy * per_step, dict(kinds), kernels, len(events) / steps)


def kind(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    lower = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), OTHER)


def report(profiles: dict[str, Profile], folder: Path, name: str = "step-profile-cuda", longest: int = 12) -> str:
    """Write the profiles; return the tables."""
    rows: list[Sequence[object]] = [
        [label, *(f"{one.kinds.get(label, 0.0):.1f}" for one in profiles.values())] for label in [*KINDS, OTHER]
    ]
    rows += [
        ["gaps", *(f"{one.gaps:.1f}" for one in profiles.values())],
        ["**a step**", *(f"{one.span:.1f}" for one in profiles.values())],
        ["kernels", *(f"{one.launches:.0f}" for one in profiles.values())],
    ]
    text = "# What the GPU does in a training step, ms\n\n" + markdown(rows, ["", *profiles])
    for label, one in profiles.items():
        table = [[f"`{kernel[:90]}`", f"{ms:.2f}", f"{count:.0f}"] for kernel, ms, count in one.kernels[:longest]]
        text += f"\n\n{label}, the longest:\n\n" + markdown(table, ["kernel", "ms", "times"])
    data = {label: {**vars(one), "kernels": one.kernels[:60], "gaps": one.gaps} for label, one in profiles.items()}
    path = write_result(folder, name, origin(), {"profiles": data}, text)
    return f"{text}\n\n{path}.json, .md"


if __name__ == "__main__":
    run(main)
