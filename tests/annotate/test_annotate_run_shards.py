"""Local processes: Ctrl-C ends between shards, a killed process loses nothing, and nothing is ever torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from annotate_examples import SlowJob, make_shards

from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import State
from powerclip.annotate.run_shards import StopOnInterrupt, annotate, run_local
from powerclip.errors import UserError

ROOT = Path(__file__).parents[2]


def flat(sidecars: Path) -> Job:
    return Job("trees", "flat", sidecars, device="cpu")


def contents(folder: Path) -> dict[str, bytes]:
    # A process that was killed leaves its lock, which the next one takes over.
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_the_first_ctrl_c_finishes_the_shard_that_has_begun(tmp_path, capsys):
    shards = make_shards(tmp_path / "shards", 3)

    def interrupt(shard: str, done: int, of: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with StopOnInterrupt() as stop:
        results = list(run_local(shards, flat(tmp_path / "side"), 1, stop, interrupt))
        assert stop()
    assert [result.shard for result in results] == shards[:1]
    assert list(contents(tmp_path / "side")) == ["000.trees.parquet"]
    assert "Ctrl-C again" in capsys.readouterr().out


def test_the_second_ctrl_c_stops_at_once_and_leaves_nothing_half_written(tmp_path):
    shards = make_shards(tmp_path / "shards", 3)

    def interrupt(shard: str, done: int, of: int) -> None:
        if shard == shards[1]:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background of a shell
    with pytest.raises(KeyboardInterrupt), StopOnInterrupt() as stop:
        list(run_local(shards, flat(tmp_path / "side"), 1, stop, interrupt))
    assert list(contents(tmp_path / "side")) == ["000.trees.parquet"]
    assert signal.getsignal(signal.SIGINT) is before


def test_processes_that_die_cost_no_shard_but_one_that_kills_them_all(tmp_path, monkeypatch):
    monkeypatch.setattr("powerclip.runtime.processes.ATTEMPTS", 2)
    shards = make_shards(tmp_path / "shards", 8)
    (tmp_path / "pids").mkdir()
    job = SlowJob("trees", "words", tmp_path / "side", pids=tmp_path / "pids", deadly="number 7")
    killed: list[int] = []
    ended = []
    with StopOnInterrupt() as stop:
        for result in run_local(shards, job, 2, stop, lambda *_: None):
            ended.append(result)
            if not killed:
                killed.append(job.running()[0])
                os.kill(killed[0], signal.SIGKILL)
    assert sorted(result.shard for result in ended) == shards  # each ends once
    states = {result.shard: result.state for result in ended}
    assert states.pop(shards[7]) is State.FAILED
    assert set(states.values()) <= {State.NEW, State.DONE}
    assert {result.reason for result in ended} == {None, "every process that tried it died"}
    calm = SlowJob("trees", "words", tmp_path / "calm", seconds=0)
    annotate(shards[:7], calm, workers=1, quiet=True)
    assert contents(tmp_path / "side") == contents(tmp_path / "calm")


def test_ctrl_c_lets_both_processes_finish_their_shards(tmp_path):
    shards = make_shards(tmp_path / "shards", 12)
    job = SlowJob("trees", "words", tmp_path / "side")
    ended = []
    with StopOnInterrupt(lambda text: None) as stop:
        for result in run_local(shards, job, 2, stop, lambda *_: None):
            ended.append(result.shard)
            if len(ended) == 2:
                os.kill(os.getpid(), signal.SIGINT)
    assert 2 <= len(ended) <= 5
    assert len(contents(tmp_path / "side")) == len(ended)


def test_what_is_wrong_with_the_job_is_one_error_from_any_number_of_processes(tmp_path):
    shards = make_shards(tmp_path / "shards", 3)
    wrong = Job("regions", "superpixels", tmp_path, options={"mots": 3})
    for workers in (1, 2):
        with StopOnInterrupt() as stop, pytest.raises(UserError, match="did you mean 'most'"):
            list(run_local(shards, wrong, workers, stop, lambda *_: None))


# Imports once, then forks a writer for each round and kills it while it writes.
WRITE = """
import itertools, os, signal, sys, time
from pathlib import Path
from powerclip.annotate.writer import TreeRows, write_sidecar
from powerclip.data.sidecar import Annotator, SidecarInfo, read_trees
count, path = 3000, Path(sys.argv[1])
rows = TreeRows([str(n) for n in range(count)], [[n] for n in range(count)], [[()]] * count, [[None]] * count)
for wait in range(20):
    path.unlink(missing_ok=True)
    writer = os.fork()
    for number in itertools.count() if writer == 0 else ():
        info = SidecarInfo("trees", Annotator("test", str(number)), "0.tar", "", count, count)
        write_sidecar(path, info, rows)
    while not path.exists():
        time.sleep(0.001)
    time.sleep(wait / 1000)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert len(read_trees(path)) == count
print("whole")
"""


def test_a_writer_that_is_killed_leaves_the_sidecar_before_or_after_but_never_half_of_it(tmp_path):
    command = [sys.executable, "-c", WRITE, str(tmp_path / "0.trees.parquet")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "whole", done.stderr


def test_kill_9_of_the_command_tears_nothing_and_the_next_run_completes_it(tmp_path):
    shards = make_shards(tmp_path / "shards", 60, samples=2)
    arguments = ["annotate", "trees", *shards, "--sidecars", str(tmp_path / "side"), "--parser", "flat", "-w", "1"]
    process = subprocess.Popen([sys.executable, "-m", "powerclip", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    killer = threading.Timer(60, process.kill)
    killer.start()
    while process.poll() is None and len(list((tmp_path / "side").glob("*.parquet"))) < 5:
        time.sleep(0.001)
    process.kill()
    process.wait()
    killer.cancel()
    done = contents(tmp_path / "side")
    assert 5 <= len([name for name in done if name.endswith(".parquet") and not name.startswith(".")]) < 60
    again = annotate(shards, flat(tmp_path / "side"), workers=1, quiet=True)
    assert again.shards[State.DONE] >= 5
    assert again.shards[State.DONE] + again.shards[State.NEW] == 60
    annotate(shards, flat(tmp_path / "calm"), workers=1, quiet=True)
    whole = {name: data for name, data in contents(tmp_path / "side").items() if not name.startswith(".")}
    assert whole == contents(tmp_path / "calm")
