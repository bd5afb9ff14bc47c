"""Batches from shards: each sample once an epoch, the same for any number of workers and ranks, whatever was before."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from mini_corpus import write_shard
from PIL import Image
from shard_examples import (
    TOKENIZER,
    block,
    caption_of,
    encoded,
    loader,
    many_captions,
    ramp,
    sample,
    spans_of,
    write_regions,
    write_samples,
    write_trees,
)

from powerclip.data.batch import Batch
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD
from powerclip.data.tokens import pack_phrases
from powerclip.data.trees import flat_tree, tree_from_spans
from powerclip.errors import UserError
from powerclip.runtime.distributed import Ranks


def same(a: Batch, b: Batch) -> bool:
    tensors = [(getattr(a, name), getattr(b, name)) for name in ("images", "tokens", "regions")]
    tensors += [(getattr(a.phrases, f.name), getattr(b.phrases, f.name)) for f in fields(a.phrases)]
    equal = all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in tensors)
    return equal and a.keys == b.keys and a.counts == b.counts


def keys(batches) -> list[str]:
    return [key for batch in batches for key in batch.keys]


def values(images: torch.Tensor) -> torch.Tensor:
    """Normalised pixels as 0 … 255 again."""
    return (images * torch.tensor(CLIP_STD).view(3, 1, 1) + torch.tensor(CLIP_MEAN).view(3, 1, 1)) * 255


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[Path]:
    """Three shards with trees and masks: 20 samples."""
    paths = write_samples(tmp_path_factory.mktemp("shards"), [7, 5, 8])
    first = 0
    for path, count in zip(paths, [7, 5, 8], strict=True):
        names = [f"s{number:04d}" for number in range(first, first + count)]
        images = {key: dict(sample(key))[f"{key}.png"] for key in names}
        write_trees(path, {key: caption_of(key) for key in names})
        write_regions(path, {key: [block(0, 0, 0.5, 1), block(0.5, 0, 1, 1)] for key in names}, images)
        first += count
    return paths


# ---- what is in a batch ----------------------------------------------------------------------------------------------


def test_every_sample_is_shown_once_an_epoch_and_none_is_left_out(shards):
    made = loader(shards, batch_size=6)
    assert made.steps_per_epoch == 3
    # 10 batches of 6 are three epochs of 20: batch 3 holds the end of one and the beginning of the next.
    shown = keys(made.stream(0, 10))
    everything = [f"s{number:04d}" for number in range(20)]
    epochs = [shown[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_holds_images_captions_trees_and_regions_of_its_samples(shards):
    batch = loader(shards, batch_size=6, trees=True, segments=True, crop=1.0, length_multiple=8).batch(0)
    assert batch.images.shape == (6, 3, 16, 16)
    assert batch.images.is_contiguous()
    assert batch.regions.shape == (6, 3, 4)
    captions = [caption_of(key) for key in batch.keys]
    tokenized = [TOKENIZER.encode(caption) for caption in captions]
    assert torch.equal(batch.tokens, TOKENIZER.pad([one.ids for one in tokenized], multiple=8))
    trees = [tree_from_spans(spans_of(caption), caption) for caption in captions]
    expected = pack_phrases(trees, tokenized, batch.tokens.shape[1])
    assert all(torch.equal(getattr(batch.phrases, name), getattr(expected, name)) for name in ("words", "node_start"))
    assert batch.phrases.node_offsets.diff().min() > 3
    # The images' own blue, and regions that are their two masks and one random box.
    numbers = torch.tensor([int(key[1:]) for key in batch.keys])
    assert (values(batch.images)[:, 2].mean((1, 2)) - numbers).abs().max() < 1
    halves = {(True, False, True, False), (False, True, False, True)}
    assert all({tuple(row) for row in regions[:2].tolist()} == halves for regions in batch.regions)
    assert batch.counts == {"topped_up": 6}


def test_regions_of_a_partition_cover_each_image_once(shards):
    regions = loader(shards, batch_size=6, drawn="partition").batch(0).regions
    assert (regions.sum(1) == 1).all()


def test_without_trees_and_segments_captions_are_one_phrase_and_regions_are_boxes(shards):
    batch = loader(shards, batch_size=6).batch(0)
    captions = [TOKENIZER.encode(caption_of(key)) for key in batch.keys]
    expected = pack_phrases([flat_tree(caption_of(key)) for key in batch.keys], captions, batch.tokens.shape[1])
    assert torch.equal(batch.phrases.node_offsets, expected.node_offsets)
    assert batch.regions.any(-1).all()
    assert batch.counts == {}


def test_of_several_captions_one_is_shown_and_all_in_time(tmp_path):
    captions = [f"caption number {number}" for number in range(3)]
    path = write_shard(tmp_path / "a.tar", [*many_captions("x", [captions[0], " ", *captions[1:]]), *sample("y")])
    made = loader([path], batch_size=2)
    seen = Counter()
    for step in range(40):
        batch = made.batch(step)
        ids = batch.tokens[batch.keys.index("x")].tolist()
        seen[next(text for text in captions if TOKENIZER.encode(text).ids == [i for i in ids if i])] += 1
    assert set(seen) == set(captions)


def test_crops_change_from_epoch_to_epoch_and_the_seeds_say_how(shards):
    def first(**options: object) -> Batch:
        return loader(shards, batch_size=20, crop=0.3, **options).batch(options.pop("step", 0))

    usual, order, parts = first(), first(seed=1), first(augment_seed=1)
    later = loader(shards, batch_size=20, crop=0.3).batch(1)
    assert order.keys != usual.keys
    assert parts.keys == usual.keys
    assert not torch.equal(parts.images, usual.images)
    assert not torch.equal(parts.regions, usual.regions)
    at = later.keys.index(usual.keys[0])
    assert not torch.equal(later.images[at], usual.images[0])
    # A sample looks the same in whatever order its epoch is.
    at = order.keys.index(usual.keys[0])
    assert torch.equal(order.images[at], usual.images[0])


def test_the_number_of_regions_changes_neither_captions_nor_crops(shards):
    few, many = (loader(shards, trees=True, segments=True, regions=regions).batch(0) for regions in (2, 9))
    assert torch.equal(few.images, many.images)
    assert torch.equal(few.tokens, many.tokens)


def test_masks_are_drawn_without_repetition_and_all_in_time(tmp_path):
    (path,) = write_samples(tmp_path, [1])
    image = dict(sample("s0000"))["s0000.png"]
    write_regions(path, {"s0000": [block(n / 4, 0, (n + 1) / 4, 1) for n in range(4)]}, {"s0000": image})
    made = loader([path], batch_size=1, grid=(1, 4), regions=2, segments=True, crop=1.0)
    drawn = [made.batch(epoch).regions[0].tolist() for epoch in range(40)]
    assert all(one != other and sum(one) == sum(other) == 1 for one, other in drawn)
    assert len({tuple(row) for regions in drawn for row in regions}) == 4


# ---- who makes it, and from where ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("workers", [1, 3])
def test_a_stream_is_the_same_however_many_processes_make_it(shards, workers):
    options = {"trees": True, "segments": True, "crop": 0.5}
    reference = loader(shards, **options)
    made = list(loader(shards, workers=workers, **options).stream(0, 7))
    assert len(made) == 7
    assert all(same(batch, reference.batch(step)) for step, batch in enumerate(made))


def test_a_worker_that_was_not_forked_makes_the_same_batches(shards):
    made = loader(shards, trees=True, segments=True)
    made.batch(0)  # what is open stays here
    sent = pickle.loads(pickle.dumps(made.maker))
    assert torch.equal(sent[1].images, made.maker[1].images)
    assert sent[1].keys == made.maker[1].keys


@pytest.mark.parametrize("count", [2, 3, 6])
def test_ranks_share_the_batch_that_one_process_would_see(shards, count):
    whole = loader(shards, batch_size=6, crop=0.5)
    ranks = [loader(shards, batch_size=6, crop=0.5, ranks=Ranks(rank, count)) for rank in range(count)]
    for step in range(5):
        parts = [rank.batch(step) for rank in ranks]
        assert keys(parts) == whole.batch(step).keys
        assert torch.equal(torch.cat([part.images for part in parts]), whole.batch(step).images)
        assert torch.equal(torch.cat([part.regions for part in parts]), whole.batch(step).regions)


def test_a_run_goes_on_in_mid_epoch_on_another_number_of_ranks(shards):
    whole = keys(loader(shards, batch_size=6).stream(0, 10))
    before = keys(loader(shards, batch_size=6, ranks=Ranks(rank, 2)).batch(step) for step in (0, 1) for rank in (0, 1))
    after = keys(
        loader(shards, batch_size=6, ranks=Ranks(rank, 3)).batch(step) for step in range(2, 10) for rank in range(3)
    )
    assert before + after == whole


def test_what_was_consumed_is_not_read_again(shards, monkeypatch):
    made = loader(shards, batch_size=5, window=1)
    read = []
    reader = made.maker.samples.reader
    original = reader.open
    monkeypatch.setattr(reader, "open", lambda number: read.append(number) or original(number))
    shown = keys(made.stream(3, 4))
    numbers = {int(key[1:]) for key in shown}
    owner = {number: shard for shard, group in enumerate([range(7), range(7, 12), range(12, 20)]) for number in group}
    assert set(read) == {owner[number] for number in numbers}
    assert len(set(read)) < 3


def test_only_a_few_shards_are_open_at_a_time(tmp_path):
    paths = write_samples(tmp_path, [2] * 9)
    made = loader(paths, batch_size=3, window=2)
    for step in range(6):
        made.batch(step)
        assert len(made.maker.samples.reader._open) <= 4
    made.maker.samples.reader.close()
    assert not made.maker.samples.reader._open


def write_down(folder: Path, log: Path, start: int, pause: float) -> None:
    """Note what a stream shows, a line for each batch."""
    made = loader(sorted(folder.glob("*.tar")), workers=2, batch_size=3, crop=0.5)
    with log.open("a") as file:
        for batch in made.stream(start, 12):
            print(*batch.keys, f"{float(batch.images.double().sum()):.6f}", file=file, flush=True)
            time.sleep(pause)


def test_a_run_that_was_killed_goes_on_with_what_was_left(tmp_path, shards):
    folder, log = shards[0].parent, tmp_path / "log"
    forked = multiprocessing.get_context("fork")
    first = forked.Process(target=write_down, args=(folder, log, 0, 0.3))
    first.start()
    while not log.exists() or log.read_bytes().count(b"\n") < 4:
        assert first.is_alive()
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    done = log.read_bytes().count(b"\n")
    assert 4 <= done < 12
    second = forked.Process(target=write_down, args=(folder, log, done, 0))
    second.start()
    second.join()
    made = loader(shards, batch_size=3, crop=0.5)
    expected = [f"{' '.join(b.keys)} {float(b.images.double().sum()):.6f}" for b in map(made.batch, range(12))]
    assert log.read_text().splitlines() == expected


# ---- what is wrong with samples --------------------------------------------------------------------------------------

BAD = {
    "truncated jpeg": (sample("bad", encoded(ramp(200, 200), "jpeg")[:1500], suffix="jpg"), "bad/truncated_image"),
    "no image": (sample("bad", b"<html>"), "bad/unreadable_image"),
    "blank caption": (sample("bad", caption="  \n"), "bad/no_caption"),
    "binary caption": (sample("bad", caption=b"\xff\xfe\x00a\x00b"), "bad/binary_caption"),
    "zeros in the caption": (sample("bad", caption=b"a dog\0\0"), "bad/binary_caption"),
    "half a character": ([*sample("bad")[:1], ("bad.json", '{"caption": "a \\ud83d dog"}')], "bad/no_caption"),
    "json without a caption": ([*sample("bad")[:1], ("bad.json", '{"url": "x"}')], "bad/no_caption"),
    "no json": ([*sample("bad")[:1], ("bad.json", "{")], "bad/no_caption"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample_is_counted_said_and_another_stands_in(tmp_path, kind):
    members, fault = BAD[kind]
    good = [member for number in range(9) for member in sample(f"g{number}")]
    path = write_shard(tmp_path / "a.tar", [*good[:6], *members, *good[6:]])
    said: list[str] = []
    made = loader([path], batch_size=5, warn=said.append, max_bad=0.2)
    batches = [made.batch(step) for step in range(4)]  # two epochs
    assert all(len(batch) == 5 == len(set(batch.keys)) for batch in batches)
    for epoch in (batches[:2], batches[2:]):
        # All good samples once, and one of them a second time.
        assert set(keys(epoch)) == {f"g{number}" for number in range(9)}
        assert sum((Counter(batch.counts) for batch in epoch), Counter()) == {fault: 1}
    assert len(said) == 1
    assert f"{path}, sample bad: " in said[0]
    assert f"another sample replaces it. More are counted as {fault}" in said[0]


def test_who_stands_in_does_not_depend_on_workers_or_ranks(tmp_path):
    members = [m for n in range(12) for m in sample(f"x{n:02d}", *([b"bad"] if n % 4 == 1 else []))]
    path = write_shard(tmp_path / "a.tar", members)
    options = {"batch_size": 6, "max_bad": 0.5, "warn": lambda text: None}
    reference = [loader([path], **options).batch(step) for step in range(4)]
    workers = loader([path], workers=2, **options).stream(0, 4)
    assert all(same(one, other) for one, other in zip(workers, reference, strict=True))
    for step in range(4):
        parts = [loader([path], ranks=Ranks(rank, 3), **options).batch(step) for rank in range(3)]
        assert keys(parts) == reference[step].keys


@pytest.mark.parametrize("workers", [0, 2])
def test_a_strict_run_ends_with_one_line(tmp_path, workers):
    path = write_shard(tmp_path / "a.tar", [*sample("a"), *sample("b"), *sample("c", b"bad")])
    with pytest.raises(UserError, match=r"a\.tar, sample c: .*\(bad/unreadable_image\); data\.strict: false") as caught:
        list(loader([path], batch_size=3, strict=True, workers=workers).stream(0, 2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_mostly_bad_ends_the_run(tmp_path, workers):
    members = [m for n in range(20) for m in sample(f"x{n:02d}", *([b"bad"] if n < 5 else []))]
    path = write_shard(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=r"a\.tar: 4 of 20 samples are bad so far, more than data\.max_bad \(0\.15\)"):
        list(loader([path], max_bad=0.15, workers=workers, warn=lambda text: None).stream(0, 6))


def test_shards_without_a_single_good_sample_are_an_error(tmp_path):
    path = write_shard(tmp_path / "a.tar", [m for n in range(4) for m in sample(f"x{n}", b"bad")])
    with pytest.raises(UserError, match=r"100 samples in a row cannot be used, the last being .*a\.tar, sample x"):
        loader([path], warn=lambda text: None).batch(0)


def test_images_that_need_converting_are_shown_and_counted(tmp_path):
    deep = encoded(Image.fromarray(np.full((9, 9), 9000, np.uint16)))
    path = write_shard(
        tmp_path / "a.tar",
        [
            *sample("cmyk", encoded(ramp(9, 9).convert("CMYK"), "jpeg"), suffix="jpg"),
            *sample("deep", deep),
            *sample("moving", encoded(ramp(9, 9), save_all=True, append_images=[ramp(9, 9, 99)])),
        ],
    )
    batch = loader([path], batch_size=3, warn=lambda text: None).batch(0)
    assert sorted(batch.keys) == ["cmyk", "deep", "moving"]
    assert batch.counts == {"converted/cmyk": 1, "converted/16_bit": 1, "converted/animated": 1}


def test_a_shard_that_vanishes_while_it_is_read_is_bad_not_fatal(tmp_path):
    paths = write_samples(tmp_path, [4, 4])
    made = loader(paths, batch_size=4, window=2, warn=lambda text: None)
    paths[0].unlink()
    batch = made.batch(0)
    assert {int(key[1:]) for key in batch.keys} <= {4, 5, 6, 7}
    assert batch.counts["bad/unreadable_shard"] >= 1


def test_a_shard_that_is_cut_while_it_is_read_is_bad_not_fatal(tmp_path):
    (path,) = write_samples(tmp_path, [8])
    made = loader([path], batch_size=8, warn=lambda text: None)
    made.batch(0)
    os.truncate(path, path.stat().st_size // 2)
    assert made.batch(1).counts["bad/unreadable_shard"] >= 2


def test_a_shard_that_is_exchanged_while_it_is_read_is_an_error(tmp_path):
    (path,) = write_samples(tmp_path, [8])
    made = loader([path], batch_size=4)
    write_samples(tmp_path, [9])
    with pytest.raises(UserError, match=r"had 8 samples when the run began and now has 9; leave shards as they are"):
        made.batch(0)


# ---- what was asked for ----------------------------------------------------------------------------------------------


def test_batches_larger_than_the_corpus_or_not_to_be_shared_are_an_error(shards):
    with pytest.raises(UserError, match=r"train\.batch_size is 21, but the shards have only 20 samples"):
        loader(shards, batch_size=21)
    with pytest.raises(UserError, match=r"train\.batch_size is 4, which 3 ranks cannot share evenly"):
        loader(shards, batch_size=4, ranks=Ranks(0, 3))


def test_a_worker_outlives_the_signal_that_asks_the_run_to_stop(shards):
    made = loader(shards, workers=1)
    stream = made.stream(0, 30)
    next(stream)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGTERM)
    assert len(list(stream)) == 29


def test_real_shards_are_read_without_a_fault(tmp_path, real_data):
    paths = sorted((real_data / "captions10k").glob("train-*.tar"))
    made = loader(paths, sidecars=tmp_path, batch_size=32, strict=True)
    assert made.shards.samples == 10_524
    batch = made.batch(100)
    assert len(set(batch.keys)) == 32
    assert batch.counts == {}


def test_sorting_puts_the_same_samples_in_the_order_of_their_captions_lengths(shards):
    plain, ordered = (loader(shards, batch_size=16, trees=True, sort_by_length=sort).batch(0) for sort in (False, True))
    lengths = (ordered.tokens.argmax(1) + 1).tolist()
    assert lengths == sorted(lengths)
    assert ordered.lengths == tuple(lengths)
    assert plain.lengths == tuple((plain.tokens.argmax(1) + 1).tolist())
    assert ordered.short >= lengths[13]
    rows = [plain.keys.index(key) for key in ordered.keys]
    assert torch.equal(ordered.images, plain.images[rows])
    assert torch.equal(ordered.regions, plain.regions[rows])
