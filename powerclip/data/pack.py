"""`powerclip pack`: a table as indexed webdataset shards, for many machines or for other tools.

A shard is written whole or not at all, and one that is there is kept: the same command goes on where it stopped, and
the same table gives the same bytes. A row whose image cannot be decoded is left out and named in `NNNNN.skipped.tsv`.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from powerclip.data.columns import Columns
from powerclip.data.decode import storable_image
from powerclip.data.faults import BadSample, Fault
from powerclip.data.table import Table, read_table
from powerclip.data.tar_index import load_index
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress

MANIFEST = "pack.json"


@dataclass(frozen=True)
class Packed:
    """What lies in the folder."""

    shards: int
    samples: int
    skipped: dict[str, int]  # reason → rows
    first: dict[str, str]  # reason → the first of them

    def summary(self) -> str:
        """`12 shards, 11,998 samples (2 left out: bad/truncated_image, first photos/17.jpg)`."""
        notes = [f"{count:,} left out: {why}, first {self.first[why]}" for why, count in self.skipped.items()]
        shards = f"{self.shards:,} shard{'s' * (self.shards != 1)}, {self.samples:,} samples"
        return shards + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class _Manifest:
    """What decides the content of the shards."""

    table: str
    fingerprint: str
    images: int  # of a shard
    format: int = 1


def pack_table(
    path: Path, output: Path, columns: Columns | None = None, *, images: int = 1000, quiet: bool = False
) -> tuple[Table, Packed]:
    """Write a table's images and captions into tars in the folder `output`, and their indices.

    Args:
        path: the table.
        output: the folder; it may hold a part of the same shards.
        columns: which are read.
        images: of each shard.
        quiet: show no progress.

    Raises:
        UserError: the table cannot be read, the folder holds something else, or no image can be decoded.
    """
    table = read_table(path, columns)
    _check_folder(output, _Manifest(path.name, table.fingerprint(), images))
    count = -(-len(table) // images)
    digits = max(5, len(str(count - 1)))
    bar = Progress("packing", len(table), unit="images", every=10.0, quiet=quiet, transient=True)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        for shard in range(count):
            rows = range(shard * images, min((shard + 1) * images, len(table)))
            tar = output / f"{shard:0{digits}d}.tar"
            if tar.exists():
                bar.skip(len(rows))
            else:
                _write_shard(tar, table, rows, pool)
            load_index(tar)
            bar.update(rows.stop, tar.name)
    packed = _count(output)
    if not packed.samples:
        raise UserError(f"{path}: no image can be decoded; {packed.summary()}")
    return table, packed


def _check_folder(output: Path, manifest: _Manifest) -> None:
    """Begin the folder, or see that it is of the same table."""
    path = output / MANIFEST
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if found != asdict(manifest):
            raise UserError(
                f"{output} holds the shards of another table, or of this one before it changed; choose another "
                "--output, or remove them"
            )
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not an empty folder: choose another --output")
    write_atomic(path, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


@dataclass(frozen=True)
class _Row:
    image: bytes
    suffix: str
    texts: list[str]


def _write_shard(tar: Path, table: Table, rows: range, pool: ThreadPoolExecutor) -> None:
    partial = tar.with_name(f".{tar.name}.{os.getpid()}.partial")
    skipped = []
    try:
        with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as file:
            for number, row in zip(rows, pool.map(lambda number: _read(table, number), rows), strict=True):
                if isinstance(row, BadSample):
                    skipped.append(f"{row.fault}\t{table.key(number)}\t{' '.join(row.detail.split())}\n")
                    continue
                for name, content in _members(f"{number:09d}", table.key(number), row):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))
        if skipped:
            write_atomic(_skipped(tar), "".join(skipped).encode("utf-8", errors="surrogateescape"))
        partial.replace(tar)
    finally:
        partial.unlink(missing_ok=True)


def _read(table: Table, number: int) -> _Row | BadSample:
    path = table.file(number)
    try:
        return _Row(*storable_image(path.read_bytes()), table.texts(number))
    except OSError as error:
        return BadSample(Fault.MISSING, error.strerror or str(error))
    except BadSample as bad:
        return bad


def _members(key: str, image: str, row: _Row) -> Iterator[tuple[str, bytes]]:
    """One caption is a .txt file, as img2dataset writes it; several, or one of several lines, are a .json file."""
    yield f"{key}.{row.suffix}", row.image
    if len(row.texts) == 1 and len(row.texts[0].splitlines()) == 1:
        yield f"{key}.txt", row.texts[0].encode()
    else:
        yield f"{key}.json", json.dumps({"captions": row.texts, "image": image}, ensure_ascii=False).encode()


def _skipped(tar: Path) -> Path:
    return tar.with_suffix(".skipped.tsv")


def _count(output: Path) -> Packed:
    tars = sorted(output.glob("*.tar"))
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for tar in tars:
        if _skipped(tar).is_file():
            for line in _skipped(tar).read_text(encoding="utf-8", errors="replace").splitlines():
                reason, image, _ = line.split("\t", 2)
                counts[reason] += 1
                first.setdefault(reason, image)
    return Packed(len(tars), sum(len(load_index(tar)) for tar in tars), dict(counts), first)
