"""Preemption: a signal gives a checkpoint, or a checkpoint and an end; a kill at any step costs nothing but time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_run import same_weights, tiny, write_tiny

import powerclip
from powerclip.runtime import signals
from powerclip.runtime.signals import EXIT_PREEMPTED, Preempted, Signals, StopRequest
from powerclip.train import checkpoint
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.state import TrainState


@pytest.fixture(autouse=True)
def _one_thread():
    # How a sum is split over threads decides its last bits; the processes that are killed below have one thread too.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raise_at(step: int, number: int) -> Callable[[TrainState], None]:
    def on_step(state: TrainState) -> None:
        if state.step == step:
            signal.raise_signal(number)

    return on_step


def steps_of(run: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in checkpoint.checkpoints(run / "checkpoints")]


def test_sigusr1_writes_a_checkpoint_and_the_run_goes_on(tmp_path):
    recipe = tiny(tmp_path, "train.checkpoint_every=0")
    result = train(recipe, tmp_path / "run", quiet=True, on_step=raise_at(6, signal.SIGUSR1))
    assert result.folder.finished
    assert steps_of(tmp_path / "run") == [7]  # the step that was under way is finished first


def test_sigterm_writes_a_checkpoint_and_stops_and_the_resumed_run_ends_bit_equal(tmp_path):
    recipe = tiny(tmp_path, "train.checkpoint_every=0")
    with pytest.raises(Preempted, match="after step 7 of 12"):
        train(recipe, tmp_path / "run", quiet=True, on_step=raise_at(6, signal.SIGTERM))
    assert steps_of(tmp_path / "run") == [7]
    train(recipe, tmp_path / "run", quiet=True, resume="auto")
    train(recipe, tmp_path / "whole", quiet=True)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_checkpoint_is_written_when_the_clock_says_so(tmp_path, monkeypatch):
    recipe = tiny(tmp_path, "train.checkpoint_every=0", "train.checkpoint_minutes=10")
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])

    def three_minutes(state: TrainState) -> None:
        now[0] += 180

    train(recipe, tmp_path / "run", quiet=True, on_step=three_minutes)
    assert steps_of(tmp_path / "run") == [5, 9]


def test_a_second_sigterm_is_not_held_back_and_handlers_are_put_back():
    def mine(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Signals() as listening:
            signal.raise_signal(signal.SIGTERM)
            assert listening.request() is StopRequest.STOP
            with pytest.raises(TimeoutError):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_in_another_thread_leaves_the_signals_alone(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(train(tiny(tmp_path), tmp_path / "run", quiet=True)))
    thread.start()
    thread.join()
    assert done[0].folder.finished


def test_resume_auto_begins_continues_and_leaves_a_finished_run(tmp_path):
    recipe, run = tiny(tmp_path), tmp_path / "run"
    with pytest.raises(Preempted):
        train(recipe, run, quiet=True, resume="auto", on_step=raise_at(7, signal.SIGTERM))
    train(recipe, run, quiet=True, resume="auto")
    before = (run / "model" / "open_clip_model.safetensors").stat().st_mtime_ns
    train(recipe, run, quiet=True, resume="auto")
    assert (run / "model" / "open_clip_model.safetensors").stat().st_mtime_ns == before
    train(recipe, tmp_path / "whole", quiet=True)
    assert same_weights(run, tmp_path / "whole")


def test_resume_auto_starts_again_when_no_checkpoint_is_good(tmp_path):
    recipe, run = tiny(tmp_path), tmp_path / "run"
    with pytest.raises(Preempted):
        train(recipe, run, quiet=True, on_step=raise_at(7, signal.SIGTERM))
    for path in checkpoint.checkpoints(run / "checkpoints"):
        path.write_bytes(b"torn")
    train(recipe, run, quiet=True, resume="auto")
    assert len(list((run / "checkpoints").glob("*.refused"))) == 2
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")][:2] == [1, 2]
    train(recipe, tmp_path / "whole", quiet=True)
    assert same_weights(run, tmp_path / "whole")


def killed_at(folder: Path, step: int) -> None:
    """Train in this process until `step`, then kill it as the out-of-memory killer would."""
    torch.set_num_threads(1)

    def kill(state: TrainState) -> None:
        if state.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(tiny(folder, *KILLED), folder / "run", quiet=True, resume="auto", on_step=kill)


KILLED = ["train.steps=40", "train.checkpoint_every=3"]


def test_three_kills_at_random_steps_leave_a_run_that_ends_bit_equal(tmp_path):
    steps = sorted(random.sample(range(1, 40), 3))
    # Processes of their own, forked off one that has imported torch but never used it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["powerclip.train.loop", "open_clip"])
    for step in steps:
        process = context.Process(target=killed_at, args=(tmp_path, step))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, steps
    recipe = tiny(tmp_path, *KILLED)
    train(recipe, tmp_path / "run", quiet=True, resume=True)
    train(recipe, tmp_path / "whole", quiet=True)
    assert same_weights(tmp_path / "run", tmp_path / "whole"), steps


def test_a_scheduler_stops_the_command_with_a_code_that_says_try_again(tmp_path):
    overrides = ["train.steps=100000", "train.log_every=1", "train.checkpoint_every=0"]
    run = tmp_path / "run"
    options = ["--recipe", write_tiny(tmp_path), "--output", run, "--quiet", "--resume", "auto"]
    process = subprocess.Popen(
        [sys.executable, "-m", "powerclip", "train", *options, *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(powerclip.__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: any(read_metrics(run / "metrics.jsonl")), process)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: checkpoint.checkpoints(run / "checkpoints"), process)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == EXIT_PREEMPTED == 75
    assert "continue with the same command and --resume" in error
    first, last = steps_of(run)
    assert f"stopped after step {last} of 100000" in error
    assert first < last


def wait_for(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not happened() and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    assert happened()
