"""Batches of scenes: a function of the seeds and the step, in the form that the towers read."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD
from powerclip.data.scene_loader import SceneLoader
from powerclip.data.scenes import generate, render
from powerclip.data.tokens import CaptionTokenizer
from powerclip.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer()


def loader(tokenizer: CaptionTokenizer, **options: object) -> SceneLoader:
    spec = BatchSpec(**{"image_size": (32, 32), "grid": (4, 4), "batch_size": 6, "regions": 5} | options)
    return SceneLoader(spec, tokenizer)


def same(a: Batch, b: Batch) -> bool:
    tensors = [(getattr(a, name), getattr(b, name)) for name in ("images", "tokens", "regions")]
    tensors += [(getattr(a.phrases, f.name), getattr(b.phrases, f.name)) for f in fields(a.phrases)]
    return a.keys == b.keys and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in tensors)


def test_a_batch_depends_on_its_step_alone_and_not_on_what_came_before(tokenizer):
    one, other = loader(tokenizer), loader(tokenizer)
    for step in range(3):
        one.batch(step)
    assert same(one.batch(7), other.batch(7))
    assert not same(one.batch(7), other.batch(8))


def test_steps_follow_each_other_through_the_scenes_without_repetition(tokenizer):
    made = loader(tokenizer, seed=3)
    keys = [key for step in range(4) for key in made.batch(step).keys]
    assert keys == [f"train-3-{index}" for index in range(24)]


def test_images_and_captions_are_those_of_the_scenes(tokenizer):
    batch = loader(tokenizer, seed=2).batch(1)
    scenes = [generate(2, 6 + i, "train") for i in range(6)]
    pixels = batch.images * torch.tensor(CLIP_STD).view(3, 1, 1) + torch.tensor(CLIP_MEAN).view(3, 1, 1)
    assert torch.equal((pixels * 255).round().byte(), render(scenes, 32))
    expected = tokenizer.tokenizer([scene.caption for scene in scenes])
    assert torch.equal(batch.tokens, expected[:, : batch.tokens.shape[1]])
    assert not expected[:, batch.tokens.shape[1] :].any()
    assert batch.to("cpu").lengths == tuple((batch.tokens.argmax(1) + 1).tolist())


def test_shapes_are_those_of_the_grid_and_the_batch(tokenizer):
    batch = loader(tokenizer).batch(0)
    assert batch.images.shape == (6, 3, 32, 32)
    assert batch.regions.shape == (6, 5, 16)
    assert batch.regions.any(-1).all()
    assert batch.phrases.words.shape == batch.tokens.shape
    assert len(batch.phrases.node_offsets) == 7


def test_regions_of_a_partition_cover_each_image_once(tokenizer):
    regions = loader(tokenizer, drawn="partition").batch(0).regions
    assert regions.shape == (6, 5, 16)
    assert (regions.sum(1) == 1).all()


def test_boxes_follow_their_own_seed_and_change_from_step_to_step(tokenizer):
    first, other = loader(tokenizer), loader(tokenizer, augment_seed=1)
    assert torch.equal(first.batch(0).images, other.batch(0).images)
    assert not torch.equal(first.batch(0).regions, other.batch(0).regions)
    # Seed and step do not add up to the same boxes.
    assert not torch.equal(first.batch(1).regions, other.batch(0).regions)
    assert not torch.equal(first.batch(2**33).regions, first.batch(0).regions)


def test_all_nodes_are_at_least_the_phrases(tokenizer):
    phrases = loader(tokenizer).batch(0).phrases
    everything = loader(tokenizer, nodes="all").batch(0).phrases
    assert (everything.node_offsets.diff() >= phrases.node_offsets.diff()).all()
    assert len(everything.node_start) > len(phrases.node_start)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_gives_its_steps_in_order_however_it_is_made(tokenizer, workers):
    made = loader(tokenizer, workers=workers)
    streamed = list(made.stream(2, 9))
    assert len(streamed) == 7
    assert all(same(batch, made.batch(step)) for step, batch in enumerate(streamed, start=2))


def test_a_stream_that_is_left_early_stops_its_threads(tokenizer):
    import threading

    batches = loader(tokenizer, workers=2).stream(0, 1000)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_an_error_while_making_a_batch_reaches_the_one_who_asked(tokenizer, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no scene")

    monkeypatch.setattr("powerclip.data.scene_loader.generate", broken)
    with pytest.raises(RuntimeError, match="no scene"):
        next(loader(tokenizer, workers=1).stream(0, 5))


def test_batches_are_kept_in_a_folder_for_runs_that_draw_the_same(tokenizer, tmp_path, monkeypatch):
    spec = BatchSpec((32, 32), (4, 4), 6, regions=5, workers=2)
    first = list(SceneLoader(spec, tokenizer, cache=tmp_path).stream(0, 4))
    assert all(same(batch, loader(tokenizer).batch(step)) for step, batch in enumerate(first))
    other = SceneLoader(BatchSpec((32, 32), (4, 4), 6, regions=5, seed=1), tokenizer, cache=tmp_path)
    assert not same(other.batch(0), first[0])
    assert not list(tmp_path.rglob("*.lock"))

    monkeypatch.setattr("powerclip.data.scene_loader.generate", lambda *_: pytest.fail("drawn again"))
    again = SceneLoader(spec, tokenizer, cache=tmp_path)
    assert all(same(again.batch(step), batch) for step, batch in enumerate(first))
    assert all(same(*pair) for pair in zip(again.stream(0, 4), first, strict=True))


def test_nothing_but_batches_is_read_from_the_folder(tokenizer, tmp_path):
    made = SceneLoader(BatchSpec((32, 32), (4, 4), 6), tokenizer, cache=tmp_path)
    made.batch(0)
    [kept] = [path for path in tmp_path.rglob("*") if path.is_file()]
    command = pickle.dumps(Path("/"))
    kept.write_bytes(len(command).to_bytes(8, "little") + command)
    with pytest.raises(pickle.UnpicklingError, match="no part of a batch"):
        made.batch(0)


STREAM = """
import multiprocessing, sys
from powerclip.data.batch import BatchSpec
from powerclip.data.scene_loader import SceneLoader
from powerclip.data.tokens import CaptionTokenizer

spec = BatchSpec((16, 16), (2, 2), 1000, workers=2)
batches = SceneLoader(spec, CaptionTokenizer()).stream(0, 1000)
next(batches)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
sys.stdin.read()
"""


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_worker_processes_end_with_a_process_that_is_killed_though_nobody_reads_their_batches():
    with subprocess.Popen([sys.executable, "-c", STREAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stream:
        workers = [int(number) for number in stream.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(is_running, workers))
        stream.kill()
    deadline = time.monotonic() + 120
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))


def test_images_that_are_not_square_are_refused(tokenizer):
    with pytest.raises(UserError, match="scenes are square, and the model reads images of 32×64 pixels"):
        loader(tokenizer, image_size=(32, 64))


def test_a_share_of_collective_captions_is_spread_over_the_batch(tokenizer):
    spec = BatchSpec((32, 32), (4, 4), 8, seed=3)
    keys = SceneLoader(spec, tokenizer, collective=0.25).batch(2).keys
    assert [key.split("-")[0] for key in keys] == ["train", "train", "train", "collective"] * 2
    assert keys[3] == "collective-3-19"
    assert {key.split("-")[0] for key in SceneLoader(spec, tokenizer, collective=1.0).batch(2).keys} == {"collective"}
