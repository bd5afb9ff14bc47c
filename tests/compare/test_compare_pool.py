"""Several runs of a study at a time: the same results as one after the other, whatever happens to the processes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_study import write_base

from powerclip.compare.pool import Processes, _load, start_processes, visible_gpus
from powerclip.compare.run import RunOptions, compare_study
from powerclip.compare.study import read_study
from powerclip.errors import UserError

STUDY = (
    "base: base.yaml\nsettings:\n  clip: {objective: clip}\n  heavy: {alignment: {weight: 3.0}}\n"
    "  twin: {alignment: {weight: 3.0}}\n"
    "  diverges: {objective: clip, train: {max_skipped: 0}, optim: {weight_decay: 1e36}}\n"
)


@pytest.fixture
def folder(tmp_path: Path, mini_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of short runs, and the folder as the working directory."""
    write_base(tmp_path, mini_corpus, steps=3)
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(output: str, processes: Processes | None = None) -> str:
    """What the study prints, with two seeds."""
    printed = io.StringIO()
    options = RunOptions(console=Console(file=printed, width=200), processes=processes)
    compare_study(read_study(["study.yaml"]), Path(output), [0, 1], options)
    return printed.getvalue()


def runs(output: Path) -> dict[str, dict]:
    """`SETTING/seed` → the results of each run that has some."""
    settings = json.loads((output / "results.json").read_text())["settings"]
    return {
        f"{name}/{seed}": found
        for name, setting in settings.items()
        for seed, found in setting["runs"].items()
        if "error" not in found
    }


def children(process: int) -> list[int]:
    """The processes that a process has started with `spawn`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process and b"spawn_main" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # gone in the meantime
            continue
    return found


def alive(process: int) -> bool:
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Here and in processes: sums have one order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_runs_at_a_time_give_what_runs_in_turn_give_but_no_times(folder):
    with Processes(2) as processes:
        at_a_time = run("two/study", processes)
        again = run("two/study", processes)
        shards = read_study(["study.yaml"], ["data.source=shards", "data.trees=flat", "data.workers=1"])
        compare_study(shards.only(["heavy"]), Path("shards/study"), [0], RunOptions(quiet=True, processes=processes))
    run("one/study")
    two, one = runs(folder / "two/study"), runs(folder / "one/study")
    assert set(one) == {"clip/0", "clip/1", "heavy/0", "heavy/1", "twin/0", "twin/1"}
    assert {name: run["scores"] for name, run in two.items()} == {name: run["scores"] for name, run in one.items()}
    assert {name: run["last"]["loss"] for name, run in two.items()} == {
        name: run["last"]["loss"] for name, run in one.items()
    }
    assert all(run["seconds_per_step"] is None for run in two.values())  # they shared the cores
    assert all(run["seconds_per_step"] > 0 for run in one.values())
    heads = [(folder / name / "study/table.md").read_text().split("\n")[0] for name in ("two", "one")]
    assert ["time" in head for head in heads] == [False, True]
    # What diverges is noted, the rest goes on; what two settings have in common is trained once.
    assert at_a_time.count("failed: training diverged") == 4  # two runs, as they end and below the table
    assert at_a_time.count("(taken from heavy)") == 2
    assert "[8/8]" in at_a_time
    assert again.count("(finished before)") == 6
    assert set(runs(folder / "shards/study")) == {"clip/0", "heavy/0"}  # read by processes of their own


@pytest.fixture
def long_study(folder: Path) -> Iterator[subprocess.Popen]:
    """Two processes that train runs of many steps."""
    # A step takes milliseconds: the runs are longer than the test, and would be waited for if they were not ended.
    arguments = ["study.yaml", "--seeds", "1", "--processes", "2", "--only", "heavy", "train.steps=1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "powerclip", "compare", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        logs = [folder / "runs/study" / name / "seed-0/metrics.jsonl" for name in ("clip", "heavy")]
        wait_for(lambda: process.poll() is not None or all(log.exists() and log.stat().st_size for log in logs))
        assert process.poll() is None, process.communicate()
        yield process
        process.kill()


@pytest.mark.parametrize(("number", "code", "says"), [(signal.SIGTERM, 75, "stopped"), (signal.SIGKILL, -9, "")])
def test_a_process_that_is_killed_is_replaced_and_all_end_with_the_command(long_study, number, code, says):
    first = children(long_study.pid)
    assert len(first) == 2
    os.kill(first[0], signal.SIGKILL)
    wait_for(lambda: len(crew := children(long_study.pid)) == 2 and crew != first)
    assert long_study.poll() is None
    crew = children(long_study.pid)
    long_study.send_signal(number)
    _, errors = long_study.communicate(timeout=60)
    assert long_study.returncode == code
    assert says in errors
    assert "Traceback" not in errors
    wait_for(lambda: not any(map(alive, crew)), 60)


# ---- which GPU, how many processes -----------------------------------------------------------------------------------


def test_each_process_sees_one_of_the_gpus_that_may_be_used(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen = []
    for number in range(3):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        _load(visible_gpus(), number, 3)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4", "6", "4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ["0", "1"]


def test_by_default_there_is_a_process_for_each_gpu_or_one(folder, monkeypatch):
    on_cpu, anywhere = read_study(["study.yaml"]), read_study(["study.yaml"], ["train.device=auto"])
    named = read_study(["study.yaml"], ["train.device=cuda:1"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert start_processes(None, [on_cpu]).count == 1
    assert start_processes(None, [anywhere]).count == 4
    assert start_processes(6, [anywhere]).count == 6
    assert start_processes(None, [anywhere, named]).count == 1
    with pytest.raises(UserError, match=r"train.device=cuda:1 names one"):
        start_processes(2, [anywhere, named])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert start_processes(None, [anywhere]).count == 1
