"""Tables as the machinery of shards reads them: dealt into parts of 10,000 images, each of which stands for a shard.

Part 3 of `captions.csv` is called `captions.csv#00003`, and so are its sidecars, beside the table:
`captions.csv#00003.trees.parquet`. Order, windows, faults, workers and ranks are those of shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from powerclip.data.columns import Columns
from powerclip.data.faults import BadSample, Fault
from powerclip.data.shards import ShardSet
from powerclip.data.table import Table, read_table
from powerclip.errors import UserError

PART = 10_000  # images
_MARK = "#"


class PartSamples:
    """Some of a table's images, read from their files."""

    def __init__(self, part: Table):
        self._part = part

    @cached_property
    def keys(self) -> list[str]:
        """The paths of the images, as they are written."""
        return self._part.images.to_pylist()  # type: ignore[no-any-return]

    @property
    def fingerprint(self) -> str:
        """Names and captions; images are not looked at, so that masks are checked one by one."""
        return self._part.fingerprint()

    def captions(self, number: int) -> list[str]:
        """The captions of an image."""
        return self._part.texts(number)

    def image(self, number: int) -> bytes:
        """The file of an image.

        Raises:
            BadSample: it is not there any more.
        """
        try:
            return self._part.file(number).read_bytes()
        except OSError as error:
            raise BadSample(Fault.MISSING, f"the file cannot be read ({error.strerror})") from None

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class TableSet(ShardSet):
    """Tables whose parts are known by number, as shards are."""

    tables: list[Table] = field(default_factory=list)

    def open(self, number: int) -> PartSamples:
        """The images of the part of that number."""
        path, part = split_part(str(self.paths[number]))
        table = next(table for table in self.tables if table.path == path)
        return PartSamples(_part(table, part))

    def summary(self) -> str:
        """What was read of each table."""
        if len(self.tables) == 1:
            return self.tables[0].summary()
        return "; ".join(f"{table.path.name}: {table.summary()}" for table in self.tables)


def open_tables(
    paths: Sequence[Path], columns: Columns | None = None, *, strict: bool = False, max_bad: float = 1.0
) -> TableSet:
    """Read tables and deal them into parts.

    Args:
        paths: files, or folders of images with their texts.
        columns: which of them are read.
        strict: a row that cannot be used is an error.
        max_bad: the largest share of a table's rows that may be unusable.

    Raises:
        UserError: a table cannot be read, or too many of its rows are bad.
    """
    tables = [read_table(path, columns) for path in paths]
    left_out: Counter[str] = Counter()
    for table in tables:
        left_out.update(table.left_out)
        bad = sum(table.left_out.values())
        if bad > max_bad * (bad + len(table)) or (bad and strict):
            remedy = "data.strict: false goes on without them" if strict else "mend them, or raise data.max_bad"
            raise UserError(
                f"{table.path}: {bad:,} of {bad + len(table):,} rows are bad; {'; '.join(table.complaints())}; {remedy}"
            )
    parts = [(table, number) for table in tables for number in range(_count(table))]
    return TableSet(
        paths=[Path(part_name(table.path, number)) for table, number in parts],
        counts=[len(_part(table, number)) for table, number in parts],
        left_out=dict(left_out),
        tables=tables,
    )


def part_name(path: Path, number: int) -> str:
    """What a part of a table is called, as the path of a shard."""
    return f"{path}{_MARK}{number:05d}"


def split_part(name: str) -> tuple[Path, int]:
    """The table and the number in the name of a part."""
    path, _, number = name.rpartition(_MARK)
    return Path(path), int(number)


def is_part(name: str) -> bool:
    """Whether a name is that of a part of a table, not of a tar."""
    path, mark, number = name.rpartition(_MARK)
    return bool(mark and path) and number.isdecimal() and len(number) == 5


def read_part(name: str, tables: dict[Path, Table], columns: Columns | None = None) -> Table:
    """The part of that name; its table is kept in `tables`."""
    path, number = split_part(name)
    if path not in tables:
        tables[path] = read_table(path, columns)
    return _part(tables[path], number)


def _count(table: Table) -> int:
    return -(-len(table) // PART)


def _part(table: Table, number: int) -> Table:
    return table.slice(range(number * PART, min((number + 1) * PART, len(table))))
