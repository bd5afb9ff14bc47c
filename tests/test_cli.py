"""The command line: quick to answer, and one clear line for what the user got wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import powerclip
from powerclip import cli
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.train.metrics import read_metrics
from powerclip.train.recipe import Recipe
from powerclip.train.run_folder import RunFolder

ROOT = Path(powerclip.__file__).parents[1]
TINY = [
    "model.config={embed_dim: 16, vision_cfg: {image_size: 16, patch_size: 8, width: 16, layers: 1, head_width: 8}, "
    "text_cfg: {context_length: 40, width: 8, heads: 1, layers: 1}}",
    "regions.count=3",
    "train.steps=3",
    "optim.warmup=0",
    "train.batch_size=4",
    "train.device=cpu",
    "train.evaluate_every=2",
]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "powerclip", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def call(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit code and standard error of a command, in this process."""
    patch.setattr(sys, "argv", ["powerclip", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    code = left.value.code
    return (0 if code is None else int(code)), capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["compare", "--help"]])
def test_help_does_not_wait_for_torch(arguments):
    code = (
        "import sys; sys.argv = ['powerclip', *sys.argv[1:]]\n"
        "from powerclip.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'open_clip', 'matplotlib', 'torchvision'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["train", "compare", "quickstart", "ground", "export", "push"])
def test_each_command_shows_examples_that_call_it(command):
    shown = CliRunner().invoke(cli.app, [command, "--help"])
    assert shown.exit_code == 0
    _, _, examples = shown.stdout.partition("Examples:")
    assert f"powerclip {command}" in examples


def test_the_version_is_the_packages():
    assert CliRunner().invoke(cli.app, ["--version"]).stdout.strip() == f"powerclip {powerclip.__version__}"


def test_a_recipe_runs_from_the_command_line_and_refuses_to_run_over_itself(tmp_path, monkeypatch, capsys):
    arguments = ["train", "--recipe", "quickstart/powerclip", "--output", tmp_path / "run", *TINY]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    assert (tmp_path / "run" / "model" / "open_clip_config.json").is_file()
    scores = [
        row
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "evaluate/scenes/retrieval/mean_recall" in row
    ]
    assert [row["step"] for row in scores] == [2, 3]
    code, error = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert error.startswith("powerclip: error: ")
    assert "--overwrite" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--recipe", "gone.yaml"], "no recipe file gone.yaml"),
        (["train", "--recipe", "quickstart/clip", "optim.ler=1"], "did you mean 'lr'?"),
        (["train", "--recipe", "quickstart/clip", "steps"], "is not key=value"),
        (["train", "--recipe", "quickstart/clip", "--resume", "--output", "nowhere"], "nothing to resume"),
        (["train", "--recipe", "quickstart/clip", "--resume", "--overwrite"], "exclude each other"),
        (
            ["train", "--recipe", "quickstart/clip", "model.config=null", "model.name=ViT-B-61", "--output", "run"],
            "ViT-B-61",
        ),
        (["train", "--recipe", "captions10k/clip", "data.shards=nowhere.tar"], "no file nowhere.tar"),
        (["compare", "gone.yaml"], "no study file gone.yaml"),
        (["compare", "train.steps=3"], "name a study file"),
        (["compare", "quickstart/clip", "quickstart/powrclip"], "did you mean 'quickstart/powerclip'?"),
        (["compare", "quickstart/clip", "quickstart/powerclip", "--only", "powrclip"], "did you mean 'powerclip'?"),
        (["compare", "quickstart/clip", "quickstart/powerclip", "--seed-list", "0,one"], "such as 0,1,7"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    code, error = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert error.startswith("powerclip: error: ")
    assert len(error.splitlines()) == 1
    assert expected in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["train"], ["trian"], ["train", "--recipe"], ["quickstart", "--steps", "0"]])
def test_wrong_usage_is_exit_code_2(monkeypatch, capsys, arguments):
    code, error = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (UserError("two\nlines"), "powerclip: error: two lines\n"),
        (FileNotFoundError(2, "No such file or directory", "x.png"), "powerclip: error: x.png: No such file"),
        (PermissionError(13, "Permission denied", "/secret/x"), "powerclip: error: /secret/x: Permission denied"),
        (OSError(28, "No space left on device"), "powerclip: error: No space left on device: make room"),
    ],
)
def test_what_a_command_raises_for_its_user_becomes_one_line(monkeypatch, capsys, raised, expected):
    def broken(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("powerclip.train.recipe.load_recipe", broken)
    code, error = call(monkeypatch, capsys, "train", "--recipe", "quickstart/clip")
    assert (code, error.splitlines()[0] + "\n") == (2, error)
    assert error.startswith(expected)


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("powerclip.train.recipe.load_recipe", broken)
    monkeypatch.setattr(sys, "argv", ["powerclip", "train", "--recipe", "quickstart/clip"])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupted_run_says_how_to_go_on_and_exits_as_shells_expect(tmp_path, monkeypatch, capsys, begun):
    def interrupted(recipe: Recipe, folder: Path, **__: object) -> None:
        if begun:
            RunFolder(folder).begin(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("powerclip.train.loop.train", interrupted)
    code, error = call(monkeypatch, capsys, "train", "--recipe", "quickstart/clip", "--output", tmp_path / "run")
    assert code == 130
    assert ("--resume" in error, str(tmp_path / "run") in error) == (begun, begun)


def test_an_index_is_not_silently_kept_somewhere_else(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.tar").touch()
    code, said = call(monkeypatch, capsys, "index", tmp_path / "a.tar", "--sidecars", tmp_path / "a.tar")
    assert code == 2
    assert said.endswith("a.tar: it is a file, not a folder\n")


def test_a_full_disk_names_the_file_and_leaves_no_half_of_it(tmp_path, monkeypatch):
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*results\.json'"):
        write_atomic(tmp_path / "results.json", b"{}")
    assert list(tmp_path.iterdir()) == []
