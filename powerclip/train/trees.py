"""The trees of a run: those that lie in sidecars, and where there are none, those that the embedded parser makes now.

What it makes are sidecars as `powerclip annotate trees` writes them: beside the data, in `data.sidecars`, or, where
neither can be written, in the user's cache. A shard is parsed once, by whichever rank or process comes first, and kept
when the run is interrupted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import State
from powerclip.annotate.run_shards import ShardProgress, run_local
from powerclip.annotate.sources import Sources
from powerclip.data.columns import Columns
from powerclip.data.faults import FLAT_TREES, BadSample, FaultReport
from powerclip.data.paths import user_cache
from powerclip.data.remote import RemoteCache
from powerclip.data.shard_reader import OpenShard, ShardReader
from powerclip.data.shard_samples import find_tree
from powerclip.data.shards import ShardSet
from powerclip.data.sidecar import SidecarError, TreeSidecar, find_sidecars, read_info, sidecar_path
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.runtime.progress import Progress, duration

PARSER = "embedded"
_FEW = 20_000  # samples that are sooner parsed than processes are started
_LINE_EVERY = 10.0  # seconds between two lines of progress where there is no terminal
_PROBED_SHARDS, _PROBED_SAMPLES = 8, 32


@dataclass(frozen=True)
class TreeFolder:
    """Where the sidecars of trees lie."""

    folder: Path | None  # None: beside the shards
    note: str  # which trees these are, in words


def prepare_trees(
    shards: Sequence[str],
    sidecars: Path | None,
    columns: Columns | None = None,
    ranks: Ranks = SINGLE,
    *,
    samples: int | None = None,
    cache: RemoteCache | None = None,
    progress: bool = False,
) -> TreeFolder:
    """The sidecars of trees of all shards; the embedded parser makes those that are missing.

    Args:
        shards: tars, or parts of tables.
        sidecars: the folder that the user names for them; None: beside the shards.
        columns: of tables.
        ranks: begin at different shards; a shard that another one parses is waited for.
        samples: of all shards, where that is known; a few are sooner parsed than processes are started.
        cache: of remote shards, which are then named by the paths of their copies.
        progress: show a bar, or a line now and then.

    Raises:
        UserError: a sidecar cannot be written.
    """
    folder = sidecars or _default_folder(shards)
    sources = Sources(columns or Columns(), cache)
    todo = [shard for shard in shards if _is_missing(shard, folder, sources)]
    where = f"in {folder}" if folder else "beside the data"
    if not todo:
        return TreeFolder(folder, f"trees of the sidecars {where}")
    first = ranks.rank * len(todo) // ranks.count
    todo = [*todo[first:], *todo[:first]]
    job = Job("trees", PARSER, folder, "cpu", columns=columns or Columns(), cache=cache)
    # Ranks share the cores of their machine; how many of them it has, torchrun says.
    workers = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if samples is not None and samples <= _FEW:
        workers = 1
    captions = flat = 0
    bar = Progress("parsing captions", len(todo), unit="shards", every=_LINE_EVERY, quiet=not progress, transient=True)
    # Neither the threads nor the random numbers of the run depend on whether it had to parse.
    threads = torch.get_num_threads()
    with bar, torch.random.fork_rng(devices=[]):
        shown = ShardProgress(bar)
        try:
            for result in run_local(todo, job, workers, lambda: False, shown.on_samples):
                shown.on_result(result)
                if result.state in (State.NEW, State.REDONE):
                    captions += result.items
                    flat += sum(result.fallbacks.values())
        finally:
            torch.set_num_threads(threads)
    left_flat = f", {flat:,} of them left flat" if flat else ""
    took = duration(bar.elapsed)
    made = f"trees: {captions:,} captions parsed now by the {PARSER} parser in {took}{left_flat}, kept {where}"
    before = len(shards) - len(todo)
    return TreeFolder(folder, made + (f"; {before:,} of {len(shards):,} sidecars were there" if before else ""))


def check_trees(shards: ShardSet, trees: TreeFolder, remedy: str) -> None:
    """UserError when captions would be one phrase each, as far as a few hundred of them tell.

    A run would go on with them, and learn nothing from phrases.
    """
    reader = ShardReader(shards, trees=True, regions=False, tree_folder=trees.folder)
    report, seen, flat = FaultReport(), 0, 0
    usable = [number for number, count in enumerate(shards.counts) if count]
    for number in usable[:: -(-len(usable) // _PROBED_SHARDS)]:
        with suppress(BadSample):
            for sample, caption in _first_captions(reader.open(number)):
                seen += 1
                find_tree(reader.open(number), sample, caption, f"{reader.path(number)}, sample {sample}", report)
                flat += _made_flat(reader.open(number))
    reader.close()
    if not seen or max(report.counts[FLAT_TREES], flat) < seen:
        return
    made_flat = (
        "the sidecars were made with --parser flat" if flat else "the parser found no phrases: are they English?"
    )
    why = next(iter(report.first.values()), made_flat)
    raise UserError(
        f"data.trees: none of {seen:,} captions looked at has a tree that belongs to it ({trees.note}; {why}); {remedy}"
    )


def _first_captions(shard: OpenShard) -> Iterator[tuple[str, str]]:
    """Some samples of a shard, each with a caption."""
    for number, key in enumerate(shard.samples.keys[:_PROBED_SAMPLES]):
        with suppress(BadSample):
            yield key, shard.samples.captions(number)[0]


def _made_flat(shard: OpenShard) -> bool:
    return isinstance(shard.trees, TreeSidecar) and shard.trees.info.annotator.name == "flat"


def _default_folder(shards: Sequence[str]) -> Path | None:
    """Beside the shards, where trees lie there or can be written; else a folder of the user's cache."""
    if find_sidecars(shards, "trees"):
        return None
    parents = {Path(shard).parent for shard in shards}
    if all(is_writable(parent) for parent in parents):
        return None
    names = "\n".join(sorted(os.path.realpath(parent) for parent in parents))
    return user_cache("trees") / blake2b(names.encode("utf-8", errors="surrogateescape"), digest_size=8).hexdigest()


def is_writable(folder: Path) -> bool:
    """Whether a file can be made in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_missing(shard: str, folder: Path | None, sources: Sources) -> bool:
    """Whether the parser has to make a shard's sidecar: there is none that can be read, or its captions changed since.

    What another parser made is left as it is.
    """
    path = sidecar_path(shard, "trees", folder)
    if not path.exists():
        return True
    try:
        info = read_info(path)
        return info.annotator.name == PARSER and info.fingerprint != sources.fingerprint(shard, "trees")
    except SidecarError:
        return True
    except OSError:
        return False  # a tar that is missing is counted elsewhere
