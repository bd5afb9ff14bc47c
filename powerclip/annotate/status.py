"""`powerclip annotate status`: how much of a corpus is annotated, by which annotators, and how large sidecars are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from powerclip.annotate.sources import Sources
from powerclip.data.columns import Columns
from powerclip.data.remote import is_url
from powerclip.data.sidecar import Kind, SidecarError, SidecarInfo, read_info, sidecar_path
from powerclip.data.table_parts import is_part
from powerclip.errors import UserError

KINDS: tuple[Kind, ...] = ("trees", "regions")


@dataclass
class Coverage:
    """One kind of annotation over all shards."""

    kind: Kind
    shards: int  # that there are
    annotated: int = 0
    stale: Counter[str] = field(default_factory=Counter)  # sidecars that do not fit their tars, by reason
    samples: int = 0
    items: int = 0  # captions or masks
    phrases: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)
    annotators: Counter[str] = field(default_factory=Counter)  # shards of each
    bytes: int = 0

    def add(self, info: SidecarInfo, size: int) -> None:
        """Count one sidecar."""
        self.annotated += 1
        self.samples += info.samples
        self.items += info.items
        self.phrases += info.phrases
        self.fallbacks.update(info.fallbacks)
        self.left_out.update(info.left_out)
        self.annotators[str(info.annotator)] += 1
        self.bytes += size
        if info.damage:
            self.damaged.append(f"{info.shard}: {info.damage}")

    def lines(self) -> Iterator[str]:
        """The coverage, to be read."""
        share = 100 * self.annotated / max(1, self.shards)
        yield f"{self.kind}: {self.annotated:,} of {self.shards:,} shards annotated ({_percent(share)})"
        for reason, count in self.stale.most_common():
            yield f"  to be annotated again: {count:,}, {reason}"
        if not self.annotated:
            return
        by = ", ".join(
            name if count == self.annotated else f"{name} ({count:,} shards)"
            for name, count in self.annotators.most_common()
        )
        yield f"  by {by}"
        if self.kind == "trees":
            items = f"{self.items:,} captions, {_ratio(self.phrases, self.items)} phrases each"
        else:
            items = f"{self.items:,} masks, {_ratio(self.items, self.samples)} each"
        yield f"  {self.samples:,} samples, {items}"
        of = self.items if self.kind == "trees" else self.samples
        what = "flat trees" if self.kind == "trees" else "samples without masks"
        total = sum(self.fallbacks.values())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.fallbacks.most_common())
        yield f"  {what}: {total:,} ({_percent(100 * total / max(1, of))})" + (f": {reasons}" if reasons else "")
        if self.left_out:
            left_out = ", ".join(f"{count:,} with {reason}" for reason, count in self.left_out.most_common())
            yield f"  samples left out: {left_out}"
        for damage in self.damaged:
            yield f"  read in part: {damage}"
        each = f", {_ratio(self.bytes, self.items)} a mask" if self.kind == "regions" and self.items else ""
        yield f"  {_size(self.bytes)}, {_ratio(self.bytes, self.samples)} bytes a sample{each}"


def cover_shards(shards: Sequence[str], sidecars: Path | None = None, columns: Columns | None = None) -> list[Coverage]:
    """The coverage of shards, whose sidecars lie beside them or in a folder; `columns` are those of tables.

    Raises:
        UserError: there is nothing of any of them.
    """
    coverages = []
    sources = Sources(columns or Columns())
    for kind in KINDS:
        coverage = Coverage(kind, len(shards))
        for shard in shards:
            path = sidecar_path(shard, kind, sidecars)
            if not path.exists():
                continue
            try:
                info = read_info(path)
            except SidecarError:
                coverage.stale["sidecar torn or of another format"] += 1
                continue
            try:
                changed = sources.fingerprint(shard, kind) != info.fingerprint
            except OSError:
                changed = False  # a missing tar does not make its annotations stale
            if changed:
                coverage.stale["tar changed"] += 1
            else:
                coverage.add(info, path.stat().st_size)
        coverages.append(coverage)
    annotated = any(coverage.annotated or coverage.stale for coverage in coverages)
    if not annotated and not any(is_url(shard) or is_part(shard) or Path(shard).exists() for shard in shards):
        raise UserError(f"there is neither {shards[0]} nor a sidecar of it{' or of the others' * (len(shards) > 1)}")
    return coverages


def cover_folder(folder: Path) -> list[Coverage]:
    """The coverage of what lies in a folder: sidecars, tars or both."""
    names = {path.name.removesuffix(".tar") for path in folder.glob("*.tar")}
    for kind in KINDS:
        names |= {path.name.removesuffix(f".{kind}.parquet") for path in folder.glob(f"*.{kind}.parquet")}
    if not names:
        raise UserError(f"{folder} holds neither sidecars nor tars")
    return cover_shards([str(folder / f"{name}.tar") for name in sorted(names)])


def status_lines(coverages: Sequence[Coverage]) -> Iterator[str]:
    """The status, to be read."""
    for coverage in coverages:
        yield from coverage.lines()


def _ratio(value: int, of: int) -> str:
    return f"{value / max(1, of):,.1f}"


def _percent(share: float) -> str:
    """A percentage that rounds neither up to 100 nor down to 0."""
    if 0 < share < 0.1:
        return "< 0.1 %"
    if 99.9 < share < 100:
        return "> 99.9 %"
    return f"{share:.1f} %".replace(".0 %", " %")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
