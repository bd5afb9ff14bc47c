"""What is to be done to every shard, in a form that travels to other processes and machines."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerclip.annotate.pipeline import ShardAnnotator
from powerclip.annotate.region_annotator import RegionAnnotator
from powerclip.annotate.sources import Sources
from powerclip.annotate.tree_annotator import TreeAnnotator
from powerclip.data.columns import Columns
from powerclip.data.remote import RemoteCache
from powerclip.data.sidecar import Kind
from powerclip.errors import UserError, nearest


@dataclass(frozen=True)
class Job:
    """Which annotator fills which sidecars. `load` makes it, once in each process."""

    kind: Kind
    name: str  # of the parser or segmenter
    sidecars: Path | None = None
    device: str = "auto"
    weights: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 8  # images that a segmenter sees at once
    columns: Columns = field(default_factory=Columns)  # of tables
    cache: RemoteCache | None = None  # of remote shards that are named by the paths of their copies

    def load(self, worker: int = 0, workers: int = 1) -> ShardAnnotator[Any, Any]:
        """The annotator for the worker of this number, which shares the machine with the others.

        Raises:
            UserError: a name, option, file or library is not there.
        """
        threads = max(1, (os.cpu_count() or 1) // workers)
        import torch

        if "OMP_NUM_THREADS" not in os.environ:  # a value that the user set is left as it is
            torch.set_num_threads(threads)
        device = self._device(worker)
        if self.kind == "trees":
            from powerclip.annotate.parsers import load_parser

            return TreeAnnotator(
                load_parser(self.name, device, **self.options), self.sidecars, Sources(self.columns, self.cache)
            )
        from powerclip.annotate.segmenters import load_segmenter

        segmenter = load_segmenter(self.name, device, self.weights, **self.options)
        return RegionAnnotator(segmenter, self.sidecars, self.batch, threads, Sources(self.columns, self.cache))

    def check(self) -> None:
        """See, before anything is started, that there is such an annotator.

        Raises:
            UserError: no parser or segmenter has this name.
        """
        if self.kind == "trees":
            from powerclip.annotate.parsers import PARSERS as known

            what = "parser"
        else:
            from powerclip.annotate.segmenters import SEGMENTERS as known

            what = "segmenter"
        if self.name not in known:
            raise UserError(
                f"no {what} is called {self.name!r}{nearest(self.name, known)}; there are {', '.join(known)}"
            )

    def _device(self, worker: int) -> str:
        """Workers on a machine with several GPUs take one each, in turn."""
        import torch

        if self.device != "auto" or torch.cuda.device_count() < 2:
            return self.device
        return f"cuda:{worker % torch.cuda.device_count()}"

    @property
    def uses_gpu(self) -> bool:
        """Whether this machine would compute it on a GPU."""
        if self.name in ("flat", "superpixels", "coco") or self.device == "cpu":
            return False
        import torch

        return torch.cuda.is_available()

    def default_workers(self) -> int:
        """A worker for each GPU, or for each core."""
        if not self.uses_gpu:
            return os.cpu_count() or 1
        import torch

        return torch.cuda.device_count() if self.device == "auto" else 1


def parse_settings(settings: Sequence[str]) -> dict[str, int | float]:
    """The numbers in `points=32`, `quality=0.9`.

    Raises:
        UserError: one is not of this form.
    """
    numbers: dict[str, int | float] = {}
    for setting in settings:
        name, sign, text = setting.partition("=")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not sign or not math.isfinite(number):
            raise UserError(f"--set {setting}: write NAME=NUMBER, such as points=32")
        numbers[name.strip()] = int(number) if number.is_integer() and "." not in text else number
    return numbers
