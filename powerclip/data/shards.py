"""The shards of a corpus: which tars a recipe names, and how many samples each holds.

A tar that is missing, empty or cut off does not end a run. It is left out, or read up to the cut, and said once; more
than a set share of them is an error, as is any when `strict` asks for it.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from powerclip.data.paths import expand_path
from powerclip.data.samples import Samples, TarSamples
from powerclip.data.tar_index import IndexInfo, find_info, load_index
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.runtime.progress import Progress

MISSING = "missing or not to be opened"
_FEW = 16  # shards that are sooner indexed than processes are started


def expand_shards(text: str, setting: str) -> list[Path]:
    """The tars that a recipe's `setting` names, in order.

    Understood: a path, a pattern (`train-*.tar`), braces (`{00000..01242}.tar`), and `@list.txt`, a file with one of
    these a line; environment variables in each. A path that is spelled out, by braces too, need not be there.

    Raises:
        UserError: a variable is not set, a list cannot be read, or nothing matches.
    """
    from braceexpand import braceexpand

    shards: list[Path] = []
    for line in iter_names(text, setting):
        try:
            spelled = list(braceexpand(str(expand_path(line, setting))))
        except ValueError:  # its UnbalancedBracesError
            raise UserError(f"{setting}: {line}: a brace is not closed (write {{00000..00099}}.tar)") from None
        for path in spelled:
            matches = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
            if not matches:
                raise UserError(f"{setting}: nothing matches {path}")
            shards += map(Path, matches)
    if not shards:
        raise UserError(f"{setting}: {text} names no shard")
    repeated = [path for path, times in Counter(shards).items() if times > 1]
    if repeated:
        raise UserError(f"{setting}: {repeated[0]} is named twice")
    return shards


def iter_names(text: str, setting: str) -> Iterator[str]:
    """The names in `@list.txt`, one a line, without comments; else `text` itself."""
    if not text.startswith("@"):
        yield text
        return
    path = expand_path(text[1:], setting)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"{setting}: the list of shards {path} cannot be read: {reason}") from None
    yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


@dataclass(frozen=True)
class ShardSet:
    """Tars whose samples are known by number. What a run computes depends on their order and counts."""

    paths: list[Path]
    counts: list[int]  # samples of each; 0 for one that cannot be used
    folder: Path | None = None  # where indices are kept, when not beside the tars
    damage: dict[str, list[Path]] = field(default_factory=dict)  # what is wrong with a tar → which
    left_out: dict[str, int] = field(default_factory=dict)  # samples that cannot be used, by reason

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        return sum(self.counts)

    def open(self, number: int) -> Samples:
        """The samples of the shard of that number.

        Raises:
            OSError: it cannot be opened.
            UserError: it was exchanged for another since it was counted.
        """
        path = self.paths[number]
        samples = TarSamples(path, load_index(path, self.folder))
        if len(samples.keys) != self.counts[number]:
            samples.close()
            raise UserError(
                f"shard {path} had {self.counts[number]:,} samples when the run began and now has "
                f"{len(samples.keys):,}; leave shards as they are while a run reads them"
            )
        return samples

    def summary(self) -> str:
        """`1,243 shards, 10,968,539 samples (12 with no caption left out; 1 shard missing)`."""
        notes = [f"{count:,} with {reason} left out" for reason, count in self.left_out.items()]
        notes += [f"{_count(len(shards), 'shard')} {what}" for what, shards in self.damage.items()]
        text = f"{_count(len(self.paths), 'shard')}, {_count(self.samples, 'sample')}"
        return f"{text} ({'; '.join(notes)})" if notes else text


def open_shards(
    paths: Sequence[Path],
    folder: Path | None = None,
    *,
    strict: bool = False,
    max_bad: float = 1.0,
    ranks: Ranks = SINGLE,
    progress: bool = False,
) -> ShardSet:
    """Count the samples of shards, from their indices; those that have none are read once.

    Args:
        paths: the tars.
        folder: where indices are kept, when not beside the tars.
        strict: damage of any kind is an error.
        max_bad: the largest share of shards, and of a shard's samples, that may be unusable.
        ranks: several that start together share the work of indexing.
        progress: show a bar on a terminal while tars are indexed.

    Raises:
        UserError: too much is damaged, nothing can be used, or an index can be kept nowhere.
    """
    infos = _infos(paths, folder, ranks.rank * len(paths) // ranks.count, progress)
    return count_shards(paths, infos, folder, strict=strict, max_bad=max_bad)


def count_shards(
    paths: Sequence[Path],
    infos: Sequence[IndexInfo | None],
    folder: Path | None = None,
    *,
    strict: bool = False,
    max_bad: float = 1.0,
) -> ShardSet:
    """The shards of which this is known; None: one that is not there.

    Raises:
        UserError: too much is damaged, or nothing can be used.
    """
    damage: dict[str, list[Path]] = {}
    left_out: Counter[str] = Counter()
    for path, info in zip(paths, infos, strict=True):
        if info is None:
            damage.setdefault(MISSING, []).append(path)
            continue
        left_out.update(info.left_out)
        if info.damage:
            damage.setdefault(info.damage, []).append(path)
        bad = sum(info.left_out.values())
        if bad > max_bad * (bad + info.samples) or (bad and strict):
            reasons = ", ".join(f"{count:,} with {reason}" for reason, count in info.left_out.items())
            raise UserError(
                f"shard {path}: {bad:,} of {bad + info.samples:,} samples are bad ({reasons}){_way_out(strict)}"
            )
    shard_set = ShardSet(list(paths), [info.samples if info else 0 for info in infos], folder, damage, dict(left_out))
    useless = [path for path, count in zip(shard_set.paths, shard_set.counts, strict=True) if count == 0]
    if damage and (strict or len(useless) > max_bad * len(paths)):
        what, shards = next(iter(damage.items()))
        raise UserError(
            f"{_count(sum(map(len, damage.values())), 'shard')} of {len(paths):,} missing or damaged, "
            f"the first: {shards[0]} ({what}){_way_out(strict)}"
        )
    if not shard_set.samples:
        what = f" ({next(iter(damage))})" if damage else ""
        raise UserError(f"no sample can be used of {paths[0]}{what}{' and others' * (len(paths) > 1)}")
    return shard_set


def index_shards(
    paths: Sequence[Path], folder: Path | None = None, *, first: int = 0, done: Callable[[], None] = lambda: None
) -> None:
    """Make and keep the indices of tars that have none, beginning with number `first`; `done` is called after each."""
    todo = [*paths[first:], *paths[:first]]
    workers = 1 if len(todo) < _FEW else os.cpu_count() or 1
    pool: Executor = ProcessPoolExecutor(workers) if workers > 1 else ThreadPoolExecutor(1)
    with pool:
        for _ in pool.map(partial(_ensure_index, folder=folder), todo):
            done()


def _infos(paths: Sequence[Path], folder: Path | None, first: int, progress: bool) -> list[IndexInfo | None]:
    """What is known of each tar; None for one that is not there."""

    def info_of(path: Path) -> IndexInfo | bool | None:
        try:
            stored = find_info(path, folder)
        except OSError:
            return None
        return stored[0] if stored else False

    # Mostly waiting for a file system that may be far away.
    with ThreadPoolExecutor(16) as pool:
        infos = list(pool.map(info_of, paths))
        new = [path for path, info in zip(paths, infos, strict=True) if info is False]
        if new:
            with Progress("indexing", len(new), unit="shards", quiet=not progress, transient=True) as bar:
                index_shards(new, folder, first=first * len(new) // len(paths), done=bar.advance)
            infos = list(pool.map(info_of, paths))
    return [info if isinstance(info, IndexInfo) else None for info in infos]


def _ensure_index(path: Path, folder: Path | None) -> None:
    """Index a tar, unless it was or another process just did."""
    try:
        load_index(path, folder)
    except OSError:
        return  # not there, or not to be read: counted when its samples are


def _way_out(strict: bool) -> str:
    return "; data.strict: false goes on without them" if strict else "; copy them again, or raise data.max_bad"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
