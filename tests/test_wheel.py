"""The wheel, installed away from the repository: what the README shows without data works in an empty folder."""

from __future__ import annotations

import ast
import email
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="builds the wheel: pip install 'powerclip[dev]'")

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

PROJECTS = {"PIL": "pillow", "open_clip": "open_clip_torch", "skimage": "scikit-image", "yaml": "pyyaml"}
INDIRECT = {"ftfy", "huggingface_hub", "regex", "timm", "triton"}  # used where open_clip or torch has brought them
NEEDS_DATA = r"data/|data\.|\.csv|\.jpg"  # words of commands that read what the user has; tests/test_walk.py runs some

# One process for everything: importing torch and open_clip anew for each command would take most of the time.
RUN_README = """
import contextlib, io, json, sys
import powerclip
from powerclip.cli import app
from powerclip.compare.study import read_study
from powerclip.runtime.shipped import shipped_yaml
from powerclip.train.recipe import load_recipe

def capture(function, *arguments, **options):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = function(*arguments, **options)
    return [code or 0, printed.getvalue()]

asked = json.load(sys.stdin)
studies = [name for name in shipped_yaml("studies") if read_study([name])]
outputs = []
for command in asked["commands"]:
    # Training would take minutes, and a dry run of ViT-B/16 half a minute: what they read is read.
    if command[0] == "compare" and "--help" not in command:
        read_study([command[1]])
    elif command[0] == "train" and "cc12m" in " ".join(command):
        load_recipe(command[command.index("--recipe") + 1])
    else:
        outputs.append([command, *capture(app, command, standalone_mode=False)])
example = capture(exec, asked["example"], {})[1]
print(json.dumps({"package": powerclip.__file__, "studies": studies, "outputs": outputs, "example": example}))
"""


def build(folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build(folder / "dist")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--ignore-installed", str(wheel)], check=True)
    return python.parent


def run(installed: Path, *command: str, empty: Path, text: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [str(installed / command[0]), *command[1:]]
    done = subprocess.run(program, cwd=empty, env=environment, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def readme_commands() -> list[list[str]]:
    """What the README's blocks run without data, and --help of each command in its table."""
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["powerclip"] and not any(re.search(NEEDS_DATA, word) for word in words):
                dry = ["--dry-run"] if words[1] == "train" and "--dry-run" not in words else []
                commands.append([*words[1:], *dry])
    table = re.findall(r"^\| `powerclip ([a-z]+)", README, re.MULTILINE)
    return commands + [[name, "--help"] for name in table]


def test_what_the_readme_shows_without_data_works_from_the_wheel_in_an_empty_folder(installed, tmp_path):
    commands = [command for command in readme_commands() if command[0] in ("train", "compare") or "--help" in command]
    assert ["compare", "studies/scenes.yaml", "--seeds", "3"] in commands
    example = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    shown = re.search(r"It prints\n\n```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    asked = json.dumps({"commands": commands, "example": example})
    told = json.loads(run(installed, "python", "-c", RUN_README, empty=tmp_path, text=asked).splitlines()[-1])
    assert Path(told["package"]).is_relative_to(installed.parent)
    assert "scenes" in told["studies"]
    assert any("--dry-run" in command for command, _, _ in told["outputs"])
    for command, code, printed in told["outputs"]:
        assert code == 0, command
        assert printed.strip(), command
    assert told["example"].strip() == shown.strip()
    assert list(tmp_path.iterdir()) == []


def test_the_entry_point_is_the_command_line_and_the_package_says_that_it_is_typed(installed, tmp_path):
    assert run(installed, "powerclip", "--version", empty=tmp_path).startswith("powerclip ")
    (package,) = installed.parent.glob("lib/python*/site-packages/powerclip")
    assert (package / "py.typed").is_file()


def test_a_release_has_absolute_pictures_and_links_and_a_plain_build_names_no_address(tmp_path):
    address = "https://example.org/powerclip"
    for name, environment in (("plain", {"POWERCLIP_REPOSITORY": ""}), ("release", {"POWERCLIP_REPOSITORY": address})):
        with zipfile.ZipFile(build(tmp_path / name, **environment)) as archive:
            (path,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")]
            metadata = email.message_from_bytes(archive.read(path))
        text = metadata.get_payload()
        relative = re.findall(r"\]\((?![a-z]+://|#)", text)
        if name == "plain":
            assert metadata["Project-URL"] is None
            assert relative
        else:
            assert metadata["Project-URL"] == f"Repository, {address}"
            assert not relative
            assert f"({address}/raw/main/docs/images/" in text


def test_every_import_of_the_package_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {plain(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    nodes = [
        node
        for file in (ROOT / "powerclip").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    ]
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name for name in imported if name not in {*sys.stdlib_module_names, "powerclip", *INDIRECT}}
    assert not {name for name in others if plain(PROJECTS.get(name, name)) not in declared}


def plain(name: str) -> str:
    return name.lower().replace("-", "_")
