"""docs/settings.md is what the config classes say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "settings_reference.py"


@pytest.fixture
def reference(tmp_path, monkeypatch):
    """The script as a module, with its page elsewhere."""
    spec = importlib.util.spec_from_file_location("settings_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGE", tmp_path / "settings.md")
    return module


@dataclass
class Described:
    # a heading

    one: int = 1  # behind it
    # above it,
    # on two lines
    two: str = "# no comment"
    three: int = max(
        1,
        2,  # not this one
    )  # behind its last line


@dataclass
class Undescribed:
    # a heading

    one: int = 1


def test_the_page_is_current():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_old_or_missing_fails_the_check_and_is_written_without_it(reference, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["settings_reference.py", "--check"])
    with pytest.raises(SystemExit, match=r"run python tools/settings_reference\.py"):
        reference.main()
    monkeypatch.setattr(sys, "argv", ["settings_reference.py"])
    reference.main()
    monkeypatch.setattr(sys, "argv", ["settings_reference.py", "--check"])
    reference.main()
    reference.PAGE.write_text(reference.PAGE.read_text(encoding="utf-8").replace("0.001", "0.002"), encoding="utf-8")
    with pytest.raises(SystemExit, match="not current"):
        reference.main()


def test_a_description_stands_behind_its_field_or_above_it(reference):
    expected = {"one": "behind it", "two": "above it, on two lines", "three": "behind its last line"}
    assert reference.descriptions(Described) == expected


def test_a_field_without_a_description_is_an_error(reference):
    with pytest.raises(SystemExit, match=r"Undescribed\.one has no description"):
        reference.descriptions(Undescribed)
