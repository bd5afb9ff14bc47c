"""What the runs of a process share: corpora, indexed shards and evaluation tasks are read once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from powerclip.data.columns import Columns
from powerclip.data.corpus import Corpus, TreeSidecars, read_corpus
from powerclip.data.corpus_loader import CorpusLoader, PackedCorpus, pack_corpus
from powerclip.data.masks import CorpusMasks, read_masks
from powerclip.data.remote import RemoteCache, is_url
from powerclip.data.remote_shards import RemoteShards, open_remote
from powerclip.data.shards import ShardSet, expand_shards, open_shards
from powerclip.data.table_parts import TableSet, open_tables
from powerclip.data.tokens import CaptionTokenizer, Nodes
from powerclip.encoders import DualEncoder
from powerclip.evaluate.embedder import PixelStore
from powerclip.evaluate.tasks import Task
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.runtime.progress import duration
from powerclip.train.inputs import cache_folder, names_urls, remote_names, sidecar_folder, table_paths
from powerclip.train.precompute import precompute, weights_before
from powerclip.train.sections import DataSection, TrainSection
from powerclip.train.towers import in_bf16
from powerclip.train.trees import TreeFolder, prepare_trees

T = TypeVar("T")


class DataCache:
    """Corpora, shards and evaluation tasks, kept by what they were read from: hand the same cache to several runs.

    Args:
        say: called with a line about each of them when it is read.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.pixels = PixelStore()  # images that evaluations have prepared
        self._kept: dict[Hashable, Any] = {}
        self._say = say

    def corpus(
        self, shards: str, setting: str, size: int, trees: Path | TreeSidecars | None = None, note: str = ""
    ) -> Corpus:
        """The corpus of a recipe's `setting`, its images `size` pixels high and wide; `note` says where trees are."""
        paths = tuple(expand_shards(shards, setting))

        def read() -> Corpus:
            corpus = read_corpus(paths, size, trees, progress=self._say is not None)
            self._report(shards, f"{corpus.summary()}; {note}" if note else corpus.summary())
            return corpus

        return self._once(("corpus", paths, size, trees), read)

    def task(self, source: str, paths: Sequence[Path], read: Callable[[Sequence[Path]], Task]) -> Task:
        """The task that `read` makes of the paths of an evaluation's `source`."""

        def read_and_report() -> Task:
            task = read(paths)
            self._report(source, task.summary)
            return task

        return self._once(("task", tuple(paths)), read_and_report)

    def shards(
        self, data: DataSection, ranks: Ranks = SINGLE, *, trees: bool = False, regions: bool = False
    ) -> ShardSet:
        """The shards of a recipe's data section, indexed; of remote ones also the annotations that are asked for."""
        assert data.shards is not None  # DataSection checks it
        if names_urls(data.shards):
            return self._remote(data, trees=trees, regions=regions)
        shards = data.shards
        paths = tuple(expand_shards(shards, "data.shards"))
        folder = sidecar_folder(data)

        def find() -> ShardSet:
            shard_set = open_shards(
                paths,
                folder,
                strict=data.strict,
                max_bad=data.max_bad,
                ranks=ranks,
                progress=self._say is not None,
            )
            self._report(shards, shard_set.summary())
            return shard_set

        return self._once(("shards", paths, folder, data.strict, data.max_bad), find)

    def _remote(self, data: DataSection, *, trees: bool, regions: bool) -> RemoteShards:
        source = str(data.shards)
        urls = tuple(remote_names(source, "data.shards"))
        folder = sidecar_folder(data)
        remote_sidecars = data.sidecars if data.sidecars is not None and is_url(data.sidecars) else None

        def find() -> RemoteShards:
            shards = open_remote(
                urls,
                cache_folder(data),
                int(data.cache_size * 1e9),
                folder=folder,
                sidecars=remote_sidecars,
                trees=trees,
                regions=regions,
                strict=data.strict,
                max_bad=data.max_bad,
                progress=self._say is not None,
            )
            self._report(source, f"{shards.summary()}; read through {cache_folder(data)} ({data.cache_size:g} GB)")
            return shards

        return self._once(("remote", urls, data, trees, regions), find)

    def tables(self, data: DataSection) -> TableSet:
        """The tables of a recipe's data section, read and dealt into parts."""
        assert data.table is not None  # DataSection checks it
        source = data.table
        paths = tuple(table_paths(source, "data.table"))
        columns = Columns.named(data.image, data.captions)

        def read() -> TableSet:
            tables = open_tables(paths, columns, strict=data.strict, max_bad=data.max_bad)
            self._report(source, tables.summary())
            return tables

        return self._once(("tables", paths, columns, data.strict, data.max_bad), read)

    def trees(
        self,
        shards: Sequence[str],
        data: DataSection,
        ranks: Ranks = SINGLE,
        *,
        samples: int | None = None,
        cache: RemoteCache | None = None,
    ) -> TreeFolder:
        """The trees of shards or tables: those that are there, and those that the parser makes now."""
        folder, columns = sidecar_folder(data), Columns.named(data.image, data.captions)

        def find() -> TreeFolder:
            trees = prepare_trees(
                shards, folder, columns, ranks, samples=samples, cache=cache, progress=self._say is not None
            )
            self._report(str(data.table or data.shards), trees.note)
            return trees

        return self._once(("trees", tuple(shards), folder, columns), find)

    def packed(self, corpus: Corpus, tokenizer: CaptionTokenizer, nodes: Nodes, device: torch.device) -> PackedCorpus:
        """A corpus of this cache, packed for batches."""
        # CLIP's own tokenizer has no name; its context length is what can differ.
        key = ("packed", id(corpus), tokenizer.name, tokenizer.context_length, nodes, device)
        return self._once(key, lambda: pack_corpus(corpus, tokenizer, nodes, device))

    def masks(self, corpus: Corpus, data: DataSection, device: torch.device) -> CorpusMasks:
        """The masks of a corpus of this cache, on the device."""
        folder = sidecar_folder(data)

        def read() -> CorpusMasks:
            masks = read_masks(corpus, folder)
            self._report(data.sidecars or str(data.shards), masks.summary())
            return masks.to(device)

        return self._once(("masks", id(corpus), folder, device), read)

    def tokens(self, loader: CorpusLoader, encoder: DualEncoder, settings: TrainSection) -> Tensor:
        """What the frozen blocks of an image tower make of the images of a corpus of this cache."""
        depth, device = encoder.blocks_before, loader.spec.device
        before = (weights_before(encoder, depth), depth, in_bf16(settings, device), loader.spec.mean, loader.spec.std)

        def compute() -> Tensor:
            began = time.perf_counter()
            tokens = precompute(loader, encoder, settings, progress=self._say is not None)
            took = duration(time.perf_counter() - began)
            size = tokens.nbytes / 1e9
            blocks = f"the first {depth} blocks" if depth else "the embeddings"
            self._report("train.precompute", f"{len(tokens):,} images through {blocks} in {took}, {size:.2f} GB kept")
            return tokens

        return self._once(("tokens", id(loader.corpus), device, *before), compute)

    def _report(self, source: str, summary: str) -> None:
        if self._say:
            self._say(f"{source}: {summary}")

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[no-any-return]
