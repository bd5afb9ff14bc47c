"""The shards to annotate: patterns and lists to paths and URLs, and each as a file that can be read here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from powerclip.data.columns import Columns
from powerclip.data.remote import describe, expand_urls, fetch, is_url
from powerclip.data.shards import expand_shards, iter_names
from powerclip.data.table import is_table
from powerclip.data.table_parts import open_tables
from powerclip.errors import UserError


def list_shards(arguments: Iterable[str], columns: Columns | None = None) -> list[str]:
    """The tars that a command's arguments name, and the parts of tables, in order, each once.

    Understood: a path, a folder (all its tars), a pattern (`train-*.tar`), braces (`{00000..01242}.tar`), `@list.txt`,
    a file with one of these a line, and URLs with patterns and braces (`s3://bucket/{00000..00009}.tar`). What is
    spelled out need not be there: a missing tar is counted when its turn comes. Tables are files (`captions.csv`) or
    folders of images with their texts; `columns` says which of their columns are read.

    Raises:
        UserError: a list cannot be read, or nothing matches.
    """
    shards: dict[str, None] = {}
    for argument in arguments:
        for line in iter_names(argument, "SHARDS"):
            shards.update(dict.fromkeys(_expand(line, columns)))
    if not shards:
        raise UserError("no shard is named: give tars, a folder of them, or @list.txt")
    return list(shards)


def fingerprint(shard: str) -> str:
    """What changes when a shard does: its size and its time, or what its store has instead of a time.

    Raises:
        OSError: there is no such shard, or its store does not answer.
    """
    if not is_url(shard):
        status = os.stat(shard)
        return f"{status.st_size}:{status.st_mtime_ns}"
    return describe(shard).fingerprint


@contextmanager
def local_copy(shard: str) -> Iterator[Path]:
    """The shard as a file of this machine; what lies elsewhere is fetched as a whole, and removed afterwards.

    Raises:
        OSError: it cannot be fetched.
    """
    if not is_url(shard):
        yield Path(shard)
        return
    with tempfile.TemporaryDirectory(prefix="powerclip-") as folder:
        copy = Path(folder) / "shard.tar"
        fetch(describe(shard), copy)
        yield copy


def check_names(shards: Iterable[str], sidecars: Path | None) -> None:
    """Every shard must have a place for its sidecar.

    Raises:
        UserError: a remote shard without a folder for sidecars, or two shards with one sidecar.
    """
    shard_of: dict[str, str] = {}
    for shard in shards:
        if sidecars is None:
            if is_url(shard):
                raise UserError(f"{shard} is not a local file: give --sidecars DIR, a folder for its annotations")
            continue
        name = PurePosixPath(shard).name
        if name in shard_of:
            raise UserError(
                f"{shard_of[name]} and {shard} would have the same sidecar in {sidecars}: "
                "annotate them into two folders"
            )
        shard_of[name] = shard


def _expand(line: str, columns: Columns | None) -> list[str]:
    if not is_url(line):
        local = Path(line)
        if local.exists() and is_table(local) and not (local.is_dir() and any(local.glob("*.tar"))):
            return [str(part) for part in open_tables([local], columns).paths]
        if os.path.isdir(line):
            line = os.path.join(line, "*.tar")
        return [str(path) for path in expand_shards(line, "SHARDS")]
    return expand_urls(line, "SHARDS")
