"""What batches look like and what memory they take, as it is logged."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny

from powerclip.data.batch import Batch
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.data.trees import parse_bracketed
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.statistics import batch_statistics, memory


def test_trees_and_regions_are_described_by_their_means():
    captions = ["a dog on a chair", "dogs"]
    brackets = ["(NP (NP a dog) (PP on (NP a chair)))", "(NP dogs)"]
    trees = list(map(parse_bracketed, brackets, captions))
    tokenizer = CaptionTokenizer(context_length=16)
    tokenized = [tokenizer.encode(caption) for caption in captions]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    regions = torch.zeros(2, 2, 4, dtype=torch.bool)
    regions[0] = True
    batch = Batch(torch.zeros(2, 3, 4, 4), tokens, regions, pack_phrases(trees, tokenized, tokens.shape[1]), ["a", "b"])
    found = batch_statistics(batch)
    # "a dog on a chair": nodes NP, NP, PP, NP; leaves "a dog", "on", "a chair"
    assert found["batch/nodes"] == (4 + 1) / 2
    assert found["batch/leaves"] == (3 + 1) / 2
    assert found["batch/flat_trees"] == 0.5
    assert found["batch/region_area"] == 0.5
    assert found["batch/tokens"] == (7 + 3) / 2  # with start and end of text


def test_host_memory_is_what_the_process_holds():
    before = memory(torch.device("cpu"))["host_gib"]
    held = torch.ones(64 * 2**20)  # 256 MiB
    assert memory(torch.device("cpu"))["host_gib"] - before == pytest.approx(0.25, abs=0.05)
    assert held[0] == 1


def test_every_logged_row_tells_speed_waiting_memory_and_what_the_batch_was(tmp_path):
    train(tiny(tmp_path), tmp_path / "run", quiet=True)
    expected = {
        "samples_per_second",
        "data_wait",
        "host_gib",
        "skipped",
        "batch/nodes",
        "batch/region_area",
        "violation",
    }
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert expected <= row.keys()
        assert 0 <= row["data_wait"] <= 1
