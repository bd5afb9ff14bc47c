"""Settings that would give no model or a useless one, and second processes in a run's folder: one line, at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import tiny, write_tiny

import powerclip
from powerclip import cli
from powerclip.compare.run import copy_run
from powerclip.errors import UserError
from powerclip.runtime.locks import FolderLock
from powerclip.train import memory
from powerclip.train.loop import train
from powerclip.train.run_folder import RunFolder

HOLD = """
import sys
from pathlib import Path
from powerclip.runtime.locks import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Another process that works in the folder `run`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(Path(powerclip.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["optim.warmup=13"], r"optim\.warmup is 13 steps and the run only 12.*optim\.warmup=1\b"),
        (["data.samples=103", "train.epochs=0.05"], r"0\.05 epochs of 25 whole batches make 1 step"),
        (["optim.lr=1e10"], r"optim\.lr must lie in \[0, 1\], not 1"),
        (["train.steps=0"], r"train\.steps must be .*, not 0"),
    ],
)
def test_a_length_or_a_rate_that_trains_nothing_is_refused_with_the_recipe(tmp_path, overrides, complaint):
    with pytest.raises(UserError, match=complaint):
        tiny(tmp_path, *overrides)


def test_epochs_that_come_to_one_step_are_refused_when_the_data_are_counted(tmp_path, mini_corpus):
    data = ["data.source=corpus", f"data.shards={mini_corpus}/train-*.tar", "data.trees=flat", "train.epochs=1"]
    with pytest.raises(UserError, match=r"1 epochs of 1 whole batch make 1 step: lower train\.batch_size"):
        train(tiny(tmp_path, *data, "train.batch_size=12"), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"optim\.warmup is 20 steps and the run only 3"):
        train(tiny(tmp_path, *data, "optim.warmup=20"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_cannot_fit_is_refused_before_data_are_read(tmp_path, monkeypatch):
    recipe = tiny(tmp_path, "train.batch_size=4096", "train.steps=1")

    def unread(*_: object, **__: object) -> None:
        raise AssertionError("the data were opened")

    monkeypatch.setattr("powerclip.train.loop.make_loader", unread)
    monkeypatch.setattr(memory, "available", lambda device: 64 * 2**20)
    with pytest.raises(UserError, match=r"train\.batch_size=4,096 cannot fit: .*train\.accumulate=\d+ sends"):
        train(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    with pytest.raises(UserError, match="weights, gradients and AdamW's moments take"):
        train(recipe, tmp_path / "run", quiet=True)


def test_the_parts_that_the_refusal_names_do_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 64 * 2**20)
    from powerclip.train.state import start

    whole = tiny(tmp_path, "train.batch_size=4096", "train.steps=1")
    problem = memory.misfit(memory.estimate(whole, start(whole), 1), whole, start(whole))
    assert problem
    parts = int(problem.split("train.accumulate=")[1].split()[0])
    recipe = tiny(tmp_path, "train.batch_size=4096", "train.steps=1", f"train.accumulate={parts}")
    memory.check_fits(recipe, start(recipe))


def test_a_preset_among_overrides_undoes_none_of_them_whatever_their_order(tmp_path):
    first = tiny(tmp_path, "alignment.gamma=0.5", "alignment.preset=paper").alignment
    assert (first.gamma, first.loss) == (0.5, "triplet")
    assert tiny(tmp_path, "alignment.preset=paper", "alignment.gamma=0.5").alignment == first


def test_a_second_process_in_a_folder_is_refused_in_one_line(tmp_path, holder):
    with pytest.raises(UserError, match=rf"run is in use by process {holder.pid} on \S+: wait for it"):
        train(tiny(tmp_path), tmp_path / "run", quiet=True)


def test_a_live_run_is_neither_overwritten_nor_resumed_nor_copied_over(tmp_path):
    recipe, run = tiny(tmp_path, "train.steps=3"), RunFolder(tmp_path / "run")
    refused: list[str] = []

    def interfere(state: object) -> None:
        for way in ({"overwrite": True}, {"resume": True}, {"resume": "auto"}):
            with pytest.raises(UserError) as error:
                train(recipe, run.root, quiet=True, **way)
            refused.append(str(error.value))
        with pytest.raises(UserError, match="in use"):
            copy_run(run, run, recipe, model=False)

    train(recipe, run.root, quiet=True, on_step=interfere)
    assert len(refused) == 9
    assert all("in use by process" in text for text in refused)
    assert run.finished
    assert not (run.root / ".lock").exists()


def test_the_lock_of_a_killed_process_does_not_block(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    # As if another host had written it: what the file says does not matter, only who holds it.
    (tmp_path / "run" / ".lock").write_text('{"host": "elsewhere", "process": 1}')
    assert train(tiny(tmp_path, "train.steps=2"), tmp_path / "run", quiet=True).folder.finished


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path):
    lock = FolderLock(tmp_path / "run")
    reader, writer = os.pipe()
    born, birth = os.pipe()
    child = os.fork()
    if child == 0:  # lives on until the parent has closed the pipe
        os.close(writer)
        os.write(birth, b".")
        os.read(reader, 1)
        os._exit(0)
    os.read(born, 1)
    os.close(lock._handle)  # as if this process had died
    FolderLock(tmp_path / "run").release()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"data\.shards"):
        train(tiny(tmp_path, "data.source=corpus", "data.shards=nowhere/*.tar"), tmp_path / "a" / "run", quiet=True)
    assert not (tmp_path / "a").exists()


def interrupted(monkeypatch, capsys, *arguments: object) -> str:
    """What a `train` command prints when Ctrl-C comes as the towers are built."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("powerclip.train.loop.start", interrupt)
        patch.setattr(sys, "argv", ["powerclip", "train", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert left.value.code == 130
    return capsys.readouterr().err


def test_ctrl_c_promises_resume_only_where_a_run_was_begun(tmp_path, monkeypatch, capsys):
    path, run = write_tiny(tmp_path), tmp_path / "run"
    said = interrupted(monkeypatch, capsys, "--recipe", path, "--output", run)
    assert "--resume" not in said
    assert "no run was begun" in said
    assert not run.exists()
    train(tiny(tmp_path), run, quiet=True)
    assert "no run was begun" in interrupted(monkeypatch, capsys, "--recipe", path, "--output", run, "--overwrite")
    (run / "results.json").unlink()
    assert "with the same command and --resume" in interrupted(
        monkeypatch, capsys, "--recipe", path, "--output", run, "--resume"
    )
